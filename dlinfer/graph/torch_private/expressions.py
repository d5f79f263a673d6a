"""Sizes and conditions on them: sympy's expressions over named symbols, with one parser and one printer.

The printer writes Python. The parser reads a closed grammar (integers, symbols, arithmetic, comparisons), because files
come from anywhere: text of a file never reaches Python's own parser, nor sympy's, which evaluates Python.
"""

import keyword
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import sympy
import torch
from sympy.printing.precedence import PRECEDENCE
from torch import fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy import functions
from torch.utils._sympy.functions import Max, Min
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

Bounds = tuple[int | None, int | None]
"""The lowest and the highest value of a size; None where there is none."""


class SizeTextError(ValueError):
    """Text that is no size and no condition, or an expression that cannot be written as one."""


@dataclass(frozen=True)
class Size:
    """A size, or a condition on sizes. ``str()`` gives the text that ``parse_size`` and ``parse_condition`` read."""

    expression: Any

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return _Printer().doprint(self.expression)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names of its symbols, sorted."""
        return tuple(sorted(str(symbol) for symbol in self.expression.free_symbols))

    @property
    def fixed(self) -> int | None:
        """Its value where it is a number; None where it depends on a symbol."""
        return int(self.expression) if self.expression.is_Integer else None

    @property
    def symbol(self) -> str | None:
        """The symbol that it is, where it is nothing else."""
        return str(self.expression) if self.expression.is_Symbol else None

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return eval(
            f"lambda {', '.join(self.symbols)}: {self}", dict(_SCOPE)
        )  # text of the printer, not of a file

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """Its value for integers or symbolic integers. Raises KeyError for a missing symbol and ZeroDivisionError."""
        return self._function(*(values[name] for name in self.symbols))

    def bounds(self, ranges: Mapping[str, Bounds]) -> Bounds:
        """The lowest and highest value while each symbol stays in its range. Raises KeyError for an unknown symbol."""
        if (name := self.symbol) is not None:
            return ranges[name]
        limits = {_symbol(name): _limits(*ranges[name]) for name in self.symbols}
        try:
            found = bound_sympy(self.expression, limits)
        except (
            ArithmeticError,
            AssertionError,
            ValueError,
        ):  # torch's analysis does not know every operation
            return None, None
        low, high = (int(end) if end.is_Integer else None for end in (found.lower, found.upper))
        return low, high

    def renamed(self, names: Mapping[str, str]) -> "Size":
        """The same with other names for its symbols. They need not be names that the parser reads."""
        new = {_symbol(name): _symbol(names[name]) for name in self.symbols}
        return Size(self.expression.xreplace(new))


def _symbol(name: str) -> Any:
    return sympy.Symbol(name, integer=True)


def _limits(low: int | None, high: int | None) -> Any:
    return ValueRanges(-int_oo if low is None else low, int_oo if high is None else high)


def _least(*values: Any) -> Any:
    return reduce(torch.sym_min, values)


def _largest(*values: Any) -> Any:
    return reduce(torch.sym_max, values)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "pow": pow,
    "sqrt": torch.sym_sqrt,
}
"""Functions that a printed expression calls, besides min and max: code that contains one needs them in its scope."""
_SCOPE = {"__builtins__": {}, "min": _least, "max": _largest, **FUNCTIONS}


# --- from torch's symbolic numbers


def to_size(number: int | torch.SymInt, names: Mapping[Any, str]) -> Size:
    """A size over names for its symbols. Raises SizeTextError where it has no such form."""
    return Size(sympy.Integer(number)) if isinstance(number, int) else named(number.node.expr, names)


def named(expression: Any, names: Mapping[Any, str]) -> Size:
    """A sympy expression of torch's over names for its symbols. Raises SizeTextError where it has no such form."""
    for part in sympy.preorder_traversal(expression):
        if part.is_Symbol and part not in names:
            raise SizeTextError(f"{part} is the size of no input")
        if not isinstance(part, _WRITTEN) or (part.is_Pow and part.args[1] not in range(1, 9)):
            raise SizeTextError(f"{type(part).__name__} has no written form, in {expression}")
    return Size(expression.xreplace({one: _symbol(names[one]) for one in expression.free_symbols}))


def conjuncts(expression: Any) -> tuple[Any, ...]:
    """The conditions that must all be true for one to be true."""
    if expression == sympy.true:
        return ()
    return expression.args if isinstance(expression, sympy.And) else (expression,)


_WRITTEN = (
    sympy.Integer,
    sympy.Float,
    sympy.Symbol,
    sympy.Add,
    sympy.Mul,
    sympy.Pow,
    sympy.core.relational.Relational,
)
_WRITTEN += (Max, Min, sympy.Max, sympy.Min, functions.FloorDiv, functions.Mod, functions.PythonMod)
_WRITTEN += (functions.IntTrueDiv, functions.FloatTrueDiv, functions.ToFloat, functions.Identity)
_WRITTEN += (functions.TruncToInt, functions.FloorToInt, functions.CeilToInt)
_WRITTEN += (functions.FloatPow, functions.OpaqueUnaryFn_sqrt)


class _Printer(PythonPrinter):
    """Python of operators and seven functions."""

    def _print_Relational(self, expr: Any) -> str:  # noqa: N802
        return f"{self._print(expr.args[0])} {expr.rel_op} {self._print(expr.args[1])}"

    def _print_ToFloat(self, expr: Any) -> str:  # noqa: N802
        return self.parenthesize(expr.args[0], PRECEDENCE["Atom"] - 0.5)

    _print_Identity = _print_ToFloat  # noqa: N815

    def _print_TruncToInt(self, expr: Any) -> str:  # noqa: N802
        return f"trunc({self._print(expr.args[0])})"

    def _print_FloorToInt(self, expr: Any) -> str:  # noqa: N802
        return f"floor({self._print(expr.args[0])})"

    def _print_CeilToInt(self, expr: Any) -> str:  # noqa: N802
        return f"ceil({self._print(expr.args[0])})"

    def _print_FloatPow(self, expr: Any) -> str:  # noqa: N802
        return f"pow({self._print(expr.args[0])}, {self._print(expr.args[1])})"

    def _print_OpaqueUnaryFn_sqrt(self, expr: Any) -> str:  # noqa: N802
        return f"sqrt({self._print(expr.args[0])})"


# --- from text


def parse_size(text: object) -> Size:
    """The size that ``text`` (or an integer) is. Raises SizeTextError."""
    if isinstance(text, int) and not isinstance(text, bool):
        return Size(sympy.Integer(_number(text)))
    size = _read(text, _Reader.size)
    if not size.expression.is_integer:
        raise SizeTextError("a size that is no whole number")
    return size


def parse_condition(text: object) -> Size:
    """The comparison of two sizes that ``text`` is. Raises SizeTextError."""
    return _read(text, _Reader.condition)


def _read(text: object, rule: "Callable[[_Reader], Any]") -> Size:
    try:
        return Size(_Reader(text).whole(rule))
    except (
        ArithmeticError,
        AssertionError,
        TypeError,
        RecursionError,
    ) as cause:  # sympy computes with numbers
        raise SizeTextError(f"{type(cause).__name__}: {cause}") from cause


_LONGEST = 4_000
_MOST_TOKENS = 250  # each level of an expression needs two, so reading one cannot exhaust Python's stack
_LARGEST = (1 << 63) - 1

_TOKEN = re.compile(
    r"\s*(?:(\d+(?:\.\d+(?:e[-+]?\d+)?)?)|([a-z]\w*)|(//|==|!=|<=|>=|[-+*/%(),<>]))", re.ASCII
)

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": Min,
    "max": Max,
    "trunc": functions.TruncToInt,
    "floor": functions.FloorToInt,
    "ceil": functions.CeilToInt,
    "pow": lambda base, exponent: functions.FloatPow(_as_float(base), _as_float(exponent)),
    "sqrt": functions.OpaqueUnaryFn_sqrt,
}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": sympy.Eq,
    "!=": sympy.Ne,
    "<=": sympy.Le,
    ">=": sympy.Ge,
    "<": sympy.Lt,
    ">": sympy.Gt,
}


def _as_float(operand: Any) -> Any:
    return functions.ToFloat(operand) if operand.is_integer else operand


def _alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Two operands, both integers or both floats: sympy would distribute a float over a sum of integers."""
    if bool(one.is_integer) == bool(other.is_integer):
        return one, other
    return _as_float(one), _as_float(other)


def _divided(one: Any, other: Any) -> Any:
    return (functions.IntTrueDiv if one.is_integer else functions.FloatTrueDiv)(one, other)


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divided,
    "//": functions.FloorDiv,
    "%": functions.PythonMod,
}


def _number(value: int) -> int:
    if not -_LARGEST <= value <= _LARGEST:
        raise SizeTextError("a number beyond 64 bits")
    return value


class _Reader:
    """One text, token by token. Its rules give sympy's expressions."""

    def __init__(self, text: object) -> None:
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise SizeTextError("not a text, or one that is too long")
        self.tokens = list(_tokens(text))
        self.next = 0

    def whole(self, rule: "Callable[[_Reader], Any]") -> Any:
        result = rule(self)
        if self.next < len(self.tokens):
            raise SizeTextError(f"{self.tokens[self.next][1]!r} after the end")
        return result

    def condition(self) -> Any:
        left = self.size()
        sign = self.sign(*_COMPARISONS)
        if sign is None:
            raise SizeTextError("no comparison")
        return _COMPARISONS[sign](left, self.size())

    def size(self) -> Any:
        return self.chain(self.term, "+", "-")

    def term(self) -> Any:
        return self.chain(self.factor, "*", "/", "//", "%")

    def chain(self, part: Callable[[], Any], *signs: str) -> Any:
        result = part()
        while (sign := self.sign(*signs)) is not None:
            result = _ARITHMETIC[sign](*_alike(result, part()))
        return result

    def factor(self) -> Any:
        minus = False
        while self.sign("-") is not None:
            minus = not minus
        result = self.atom()
        return -result if minus else result

    def atom(self) -> Any:
        kind, text = self.take()
        if kind == "number":
            if len(text) > 32:
                raise SizeTextError("a number of too many digits")
            return sympy.Integer(_number(int(text))) if text.isdigit() else sympy.Float(float(text))
        if kind == "name" and not keyword.iskeyword(text):
            return self.call(text) if text in _FUNCTIONS else _symbol(text)
        if text != "(":
            raise SizeTextError(f"{text!r} where a size should be")
        result = self.size()
        self.need(")")
        return result

    def call(self, name: str) -> Any:
        self.need("(")
        parts = [self.size()]
        while self.sign(",") is not None:
            parts.append(self.size())
        self.need(")")
        return _FUNCTIONS[name](*parts)

    def take(self) -> tuple[str, str]:
        if self.next == len(self.tokens):
            raise SizeTextError("it ends too early")
        self.next += 1
        return self.tokens[self.next - 1]

    def sign(self, *allowed: str) -> str | None:
        """The next token, taken where it is one of these signs."""
        if self.next == len(self.tokens) or self.tokens[self.next] not in {("sign", one) for one in allowed}:
            return None
        return self.take()[1]

    def need(self, sign: str) -> None:
        if self.sign(sign) is None:
            raise SizeTextError(f"{sign!r} is missing")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place = count = 0
    while place < len(text.rstrip()):
        token = _TOKEN.match(text, place)
        if token is None:
            raise SizeTextError(f"unknown at {text[place : place + 10]!r}")
        count, place = count + 1, token.end()
        if count > _MOST_TOKENS:
            raise SizeTextError("it is too long")
        kind = token.lastindex or 1
        yield ("number", "name", "sign")[kind - 1], token[kind]


# --- as nodes of a graph


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
