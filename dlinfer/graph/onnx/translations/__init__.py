"""Translations of dlinfer's ops, and of ATen ops that torch.onnx translates badly, into ONNX's standard ops.

A translation takes an op's arguments as ``onnx_ir`` values and Python numbers, calls ops of ``opset()`` and returns the
results. It may raise Untranslated for a call that it cannot serve.
"""

from importlib import import_module

from dlinfer.graph.onnx.translations.writing import Table, Translation
from dlinfer.graph.torch_private.dispatcher import OpOverload

_PARTS = "activation attention conv extremes index integers kv_cache linear moe norm rotary sizes".split()


def standard_table() -> Table:
    """All standard translations by op."""
    table: dict[OpOverload, Translation] = {}
    for part in _PARTS:
        table |= import_module(f"{__name__}.{part}").table()
    return table
