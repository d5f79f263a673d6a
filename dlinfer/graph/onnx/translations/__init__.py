"""How dlinfer's ops, and ATen ops that torch.onnx has no fitting translation of, are written in ONNX's standard ops.

A translation takes an op's arguments as ``onnx_ir`` values and Python numbers, calls ops of ``opset()`` and gives the
results. It may raise Untranslated for a call that it cannot serve.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch._ops import OpOverload

Translation = Callable[..., Any]


_PARTS = "activation attention conv extremes index integers kv_cache linear moe norm rotary sizes".split()


def STANDARD() -> Mapping[OpOverload, Translation]:  # noqa: N802 - a table, made when first asked for
    """All standard translations by op."""
    table: dict[OpOverload, Translation] = {}
    for part in _PARTS:
        table |= import_module(f"{__name__}.{part}").table()
    return table
