"""The seam's second half: torch's private parts about symbolic sizes (``torch_seam`` has the others).

``tests/graph/test_torch_symbols.py`` uses each of them on a small case.
"""

import math
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer


def number_node(graph: fx.Graph, number: Any, symbols: dict[Any, fx.Node]) -> Any:
    """A symbolic number written as nodes of a graph over the nodes of its symbols."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    tracer = GraphAppendingTracer(graph)
    proxies: dict[Any, Any] = {symbol: fx.Proxy(node, tracer) for symbol, node in symbols.items()}
    made = sympy_interp(PythonReferenceAnalysis, proxies, number.node.expr)
    return made.node if isinstance(made, fx.Proxy) else made


def number_tree(number: Any, symbols: dict[Any, Any]) -> Any:
    """A symbolic number as plain data: ``(operation, operand, operand)`` over numbers and over what ``symbols`` has
    for its symbols.

    Operations are add, mul, floordiv, mod, pow, min and max, and of one operand trunc, which cuts a float to a whole
    number. Raises KeyError for a symbol that is not given, and AttributeError for another operation.
    """
    from torch.utils._sympy.interp import sympy_interp

    return sympy_interp(_Trees, symbols, number.node.expr)  # pyright: ignore[reportArgumentType]


class _Trees:
    """What sympy_interp calls for each operation."""

    @staticmethod
    def constant(value: Any, dtype: Any) -> float:
        if dtype is torch.bool or not math.isfinite(value):
            raise AttributeError(f"the number {value}")
        return int(value) if int(value) == value else float(value)

    @staticmethod
    def add(one: Any, other: Any) -> Any:
        return ("add", one, other)

    @staticmethod
    def mul(one: Any, other: Any) -> Any:
        return ("mul", one, other)

    @staticmethod
    def floordiv(one: Any, other: Any) -> Any:
        return ("floordiv", one, other)

    @staticmethod
    def mod(one: Any, other: Any) -> Any:
        return ("mod", one, other)

    python_mod = mod

    @staticmethod
    def pow_by_natural(one: Any, other: Any) -> Any:
        return ("pow", one, other)

    @staticmethod
    def minimum(one: Any, other: Any) -> Any:
        return ("min", one, other)

    @staticmethod
    def maximum(one: Any, other: Any) -> Any:
        return ("max", one, other)

    @staticmethod
    def trunc_to_int(one: Any, dtype: Any) -> Any:
        return ("trunc", one)

    @staticmethod
    def to_dtype(one: Any, dtype: Any) -> Any:
        """Whole numbers become floats where a float meets them."""
        return one

    @staticmethod
    def identity(one: Any) -> Any:
        return one
