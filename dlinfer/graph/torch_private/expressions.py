"""Symbolic numbers in other forms: nodes of a graph, plain data, text."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from dlinfer.utils.size_text import Size, SizeTextError


def number_node(graph: fx.Graph, number: Any, symbols: dict[Any, fx.Node]) -> Any:
    """A symbolic number written as nodes of a graph over the nodes of its symbols."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    tracer = GraphAppendingTracer(graph)
    proxies: dict[Any, Any] = {symbol: fx.Proxy(node, tracer) for symbol, node in symbols.items()}

    class Written(PythonReferenceAnalysis):
        """With the roundings as nodes: Python's functions do not take proxies."""

    for name, function in (("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil)):
        setattr(Written, f"{name}_to_int", staticmethod(_rounding(function)))
    made = sympy_interp(Written, proxies, number.node.expr)  # pyright: ignore[reportArgumentType]
    return made.node if isinstance(made, fx.Proxy) else made


def _rounding(function: Callable[[Any], int]) -> Callable[[Any, Any], Any]:
    def rounded(number: Any, dtype: Any) -> Any:
        if not isinstance(number, fx.Proxy):
            return function(number)
        return number.tracer.create_proxy("call_function", function, (number,), {})

    return rounded


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


def to_size(number: int | torch.SymInt, names: Mapping[Any, str]) -> Size:
    """A size over names for its symbols. Raises SizeTextError where it has no such form."""
    return Size(number) if isinstance(number, int) else _translated(number.node.expr, names)


def _conjuncts(expression: Any) -> Sequence[Any]:
    import sympy

    if expression == sympy.true:
        return []
    return expression.args if isinstance(expression, sympy.And) else [expression]


_SIGNS = {"Equality": "==", "Unequality": "!=", "LessThan": "<=", "GreaterThan": ">="}
_SIGNS |= {"StrictLessThan": "<", "StrictGreaterThan": ">"}


_FUNCTIONS = {"FloorDiv": "//", "CleanDiv": "//", "PythonMod": "%", "Mod": "%", "Max": "max", "Min": "min"}
_FUNCTIONS |= {"Add": "+", "Mul": "*"}


def _translated(expression: Any, names: Mapping[Any, str]) -> Size:
    if expression.is_Integer:
        return Size(int(expression))
    if expression.is_Symbol:
        if expression not in names:
            raise SizeTextError(f"{expression} is the size of no input")
        return Size(names[expression])
    kind = type(expression).__name__
    if kind == "Pow" and expression.args[1].is_Integer and 0 < expression.args[1] <= 8:
        return _joined("*", [_translated(expression.args[0], names)] * int(expression.args[1]))
    sign = _SIGNS.get(kind) or _FUNCTIONS.get(kind)
    if sign is None:
        raise SizeTextError(f"{kind} has no written form, in {expression}")
    parts = [_translated(part, names) for part in expression.args]
    return Size(sign, tuple(parts)) if sign in ("min", "max") else _joined(sign, parts)


def _joined(sign: str, parts: Sequence[Size]) -> Size:
    result = parts[0]
    for part in parts[1:]:
        result = Size(sign, (result, part))
    return result
