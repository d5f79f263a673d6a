"""Translations of dlinfer's ops, and of ATen ops that torch.onnx translates badly, into ONNX's standard ops.

A translation takes an op's arguments as ``onnx_ir`` values and Python numbers, calls ONNX's ops (``op``) and returns
the results. It may raise Untranslated for a call that has no translation.
"""

from importlib import import_module

from dlinfer.graph.onnx.translations.writing import TABLE, Table

_PARTS = "activation attention conv extremes index integers kv_cache linear moe norm rotary".split()


def standard_table() -> Table:
    for part in _PARTS:
        import_module(f"{__name__}.{part}")
    return TABLE
