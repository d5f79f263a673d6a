"""Sizes and conditions on sizes: sympy's expressions over named symbols, with one parser and one printer.

The printer writes Python. The parser reads a closed grammar (integers, symbols, arithmetic, comparisons), because a
text may be from an artifact, and an artifact may come from anywhere. The parser first splits a text into tokens of that
grammar. Only these tokens reach Python's parser, and no text is evaluated.
"""

# sympy has no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any, TypeAlias

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

Expression: TypeAlias = Any
"""An expression or a symbol of sympy."""

Bounds = tuple[int | None, int | None]
"""The lowest and the highest value of a size; None for an end without a limit."""


class SizeTextError(ValueError):
    """A text is neither a size nor a condition, or an expression cannot be written as text."""


@dataclass(frozen=True)
class Size:
    """A size, or a condition on sizes. ``str()`` returns the text that ``parse_size`` and ``parse_condition`` read."""

    expression: Expression

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return _Printer().doprint(self.expression)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names of the expression's symbols, sorted."""
        return tuple(sorted(map(str, self.expression.free_symbols)))

    @property
    def fixed(self) -> int | None:
        """The value if the expression is a number; None if it depends on a symbol."""
        return int(self.expression) if self.expression.is_Integer else None

    @property
    def symbol(self) -> str | None:
        """The symbol's name if the expression is a single symbol, else None."""
        return str(self.expression) if self.expression.is_Symbol else None

    @cached_property
    def _function(self) -> Callable[..., Any]:
        # The printer's text, not a file's.
        return eval(f"lambda {', '.join(self.symbols)}: {self}", dict(_SCOPE))

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """Return the expression's value.

        values: the value of each symbol, an integer or a symbolic integer.
        Raises KeyError for a missing symbol, and ZeroDivisionError.
        """
        return self._function(*(values[name] for name in self.symbols))

    def bounds(self, ranges: Mapping[str, Bounds]) -> Bounds:
        """Return the lowest and highest value for symbols in these ranges. Raises KeyError for an unknown symbol."""
        if (name := self.symbol) is not None:
            return ranges[name]
        limits = {_symbol(name): value_range(*ranges[name]) for name in self.symbols}
        try:
            return bounds_of(bound_sympy(self.expression, limits))
        except (ArithmeticError, AssertionError, ValueError):  # torch's analysis does not know all operations
            return None, None

    def renamed(self, names: Mapping[str, str]) -> "Size":
        """Return a copy with other names for its symbols.

        names: old name -> new name. New names may be Python code that the parser does not read, such as
        ``x.size()[0]``.
        """
        new = {_symbol(name): _symbol(names[name]) for name in self.symbols}
        return Size(self.expression.xreplace(new))


def _symbol(name: str) -> Expression:
    return sympy.Symbol(name, integer=True)


def value_range(low: int | None, high: int | None) -> ValueRanges[Expression]:
    """Return torch's range of integers; None leaves an end open."""
    return ValueRanges(-int_oo if low is None else low, int_oo if high is None else high)


def bounds_of(limits: ValueRanges[Expression]) -> Bounds:
    """Return both ends of torch's range; None for an end that is not an integer."""
    low, high = (int(end) if end.is_Integer else None for end in (limits.lower, limits.upper))
    return low, high


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "pow": pow,
    "sqrt": torch.sym_sqrt,
}
"""The functions, besides min and max, that code with a printed expression needs in scope."""
_EXTREMES: dict[str, Any] = {
    "min": lambda *values: reduce(torch.sym_min, values),  # pyright: ignore[reportUnknownLambdaType]
    "max": lambda *values: reduce(torch.sym_max, values),  # pyright: ignore[reportUnknownLambdaType]
}
_SCOPE: dict[str, Any] = {"__builtins__": {}, **_EXTREMES, **FUNCTIONS}


# --- from torch's symbolic numbers


def to_size(number: int | torch.SymInt, names: Mapping[Expression, str]) -> Size:
    """Return a size as an expression over ``names``. names: torch's symbol -> its name.

    Raises SizeTextError if a symbol is missing, or the size has no written form.
    """
    return Size(sympy.Integer(number)) if isinstance(number, int) else named(number.node.expr, names)


def named(expression: Expression, names: Mapping[Expression, str]) -> Size:
    """Return torch's expression as an expression over ``names``. names: torch's symbol -> its name.

    Raises SizeTextError if a symbol is missing, or the expression has no written form.
    """
    for part in sympy.preorder_traversal(expression):
        if part.is_Symbol and part not in names:
            raise SizeTextError(f"no input has the size {part}")
        if not isinstance(part, _WRITTEN) or (part.is_Pow and part.args[1] not in range(1, 9)):
            raise SizeTextError(f"{type(part).__name__} in {expression} cannot be written as text")
    return Size(expression.xreplace({symbol: _symbol(names[symbol]) for symbol in expression.free_symbols}))


def conjuncts(expression: Expression) -> tuple[Expression, ...]:
    """Split a conjunction: return the conditions that must all be true if ``expression`` is true."""
    if expression == sympy.true:
        return ()
    return expression.args if isinstance(expression, sympy.And) else (expression,)


# Name of a function in text -> torch's sympy function.
_CALLS: Mapping[str, Any] = {
    "trunc": functions.TruncToInt,
    "floor": functions.FloorToInt,
    "ceil": functions.CeilToInt,
    "pow": functions.FloatPow,
    "sqrt": functions.OpaqueUnaryFn_sqrt,
}
_WRITTEN = (
    *(sympy.Integer, sympy.Float, sympy.Symbol, sympy.Add, sympy.Mul, sympy.Pow),
    sympy.core.relational.Relational,
    *(Max, Min, sympy.Max, sympy.Min, functions.FloorDiv, functions.Mod, functions.PythonMod),
    *(functions.IntTrueDiv, functions.FloatTrueDiv, functions.ToFloat, functions.Identity, *_CALLS.values()),
)


class _Printer(PythonPrinter):
    """Writes Python with operators and seven functions: min, max, trunc, floor, ceil, pow and sqrt."""

    def _print(self, expr: Expression, **kwargs: object) -> str:
        for name, function in _CALLS.items():
            if isinstance(expr, function):
                return f"{name}({', '.join(map(self._print, expr.args))})"
        return super()._print(expr, **kwargs)

    def _print_Relational(self, expr: Expression) -> str:  # noqa: N802
        return f"{self._print(expr.args[0])} {expr.rel_op} {self._print(expr.args[1])}"

    def _print_ToFloat(self, expr: Expression) -> str:  # noqa: N802
        return self.parenthesize(expr.args[0], PRECEDENCE["Atom"] - 0.5)

    _print_Identity = _print_ToFloat  # noqa: N815


# --- from text


def parse_size(text: object) -> Size:
    """Return the size that a text, or an integer, describes. Raises SizeTextError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool):
        return Size(_integer(text))
    size = Size(_parsed(_tokens(text)))
    if not size.expression.is_integer:
        raise SizeTextError("a size is not an integer")
    return size


def parse_condition(text: object) -> Size:
    """Return the comparison of two sizes that a text describes. Raises SizeTextError for anything else."""
    tokens = _tokens(text)
    signs = [place for place, token in enumerate(tokens) if token in _COMPARISONS]
    if len(signs) != 1:
        raise SizeTextError("no comparison" if not signs else "two comparisons")
    left, right = _parsed(tokens[: signs[0]]), _parsed(tokens[signs[0] + 1 :])
    return Size(_COMPARISONS[tokens[signs[0]]](left, right))


_LONGEST = 4_000
_MOST_TOKENS = 250  # each level of an expression needs one, so reading it cannot exhaust Python's stack
_LARGEST = (1 << 63) - 1

_TOKEN = re.compile(r"\s*(\d+(?:\.\d+(?:e[-+]?\d+)?)?|[a-z]\w*|//|==|!=|<=|>=|[-+*/%(),<>])\s*", re.ASCII)
_COMPARISONS: Mapping[str, Callable[[Expression, Expression], Expression]] = {
    "==": sympy.Eq,
    "!=": sympy.Ne,
    "<=": sympy.Le,
    ">=": sympy.Ge,
    "<": sympy.Lt,
    ">": sympy.Gt,
}


def _as_float(operand: Expression) -> Expression:
    return functions.ToFloat(operand) if operand.is_integer else operand


def _divided(left: Expression, right: Expression) -> Expression:
    return (functions.IntTrueDiv if left.is_integer else functions.FloatTrueDiv)(left, right)


_ARITHMETIC: Mapping[type[ast.operator], Callable[[Expression, Expression], Expression]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divided,
    ast.FloorDiv: functions.FloorDiv,
    ast.Mod: functions.PythonMod,
}


def _integer(value: int) -> Expression:
    if not -_LARGEST <= value <= _LARGEST:
        raise SizeTextError("a number does not fit into 64 bits")
    return sympy.Integer(value)


def _tokens(text: object) -> list[str]:
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise SizeTextError("the size is not text, or its text is too long")
    if unknown := _TOKEN.sub("", text):
        raise SizeTextError(f"unknown characters {unknown[:10]!r}")
    tokens = _TOKEN.findall(text)
    if len(tokens) > _MOST_TOKENS:
        raise SizeTextError("the text of the size is too long")
    return tokens


def _parsed(tokens: list[str]) -> Expression:
    try:
        return _built(ast.parse(" ".join(tokens), mode="eval").body)
    except (SyntaxError, MemoryError) as cause:
        raise SizeTextError(f"{' '.join(tokens)!r} is not an expression") from cause
    # sympy computes with numbers.
    except (ArithmeticError, AssertionError, TypeError, RecursionError) as cause:
        raise SizeTextError(f"{type(cause).__name__}: {cause}") from cause


def _built(node: ast.expr) -> Expression:
    match node:
        case ast.Constant(value=int(number)):
            return _integer(number)
        case ast.Constant(value=float(number)):
            return sympy.Float(number)
        case ast.Name(id=name) if name not in _CALLS and name not in _EXTREMES:
            return _symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_built(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            operands = _built(left), _built(right)
            if bool(operands[0].is_integer) != bool(operands[1].is_integer):
                # sympy would distribute a float over a sum of integers.
                operands = map(_as_float, operands)
            return _ARITHMETIC[type(op)](*operands)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, *_] as args, keywords=[]):
            return (Min if name == "min" else Max)(*map(_built, args))
        case ast.Call(func=ast.Name(id="pow"), args=[base, exponent], keywords=[]):
            return functions.FloatPow(_as_float(_built(base)), _as_float(_built(exponent)))
        case ast.Call(func=ast.Name(id=name), args=[operand], keywords=[]) if name in _CALLS:
            return _CALLS[name](_built(operand))
        case _:
            raise SizeTextError(f"{ast.unparse(node)!r} is not a size")


# --- as nodes of a graph


def number_node(
    graph: fx.Graph,
    number: torch.SymInt | torch.SymFloat | torch.SymBool,
    symbols: Mapping[Expression, fx.Node],
) -> fx.Node | int:
    """Write a symbolic number as nodes of a graph; return the last node, or an int if the number is constant.

    symbols: symbol -> the node that has its value.
    """
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Written(PythonReferenceAnalysis):
        """Writes roundings as nodes, because Python's rounding functions do not take proxies."""

    for name in ("trunc", "floor", "ceil"):
        setattr(Written, f"{name}_to_int", staticmethod(partial(_rounded, FUNCTIONS[name])))
    tracer = GraphAppendingTracer(graph)
    proxies: dict[Expression, fx.Proxy] = {symbol: fx.Proxy(node, tracer) for symbol, node in symbols.items()}
    result: Any = sympy_interp(Written, proxies, number.node.expr)
    return result.node if isinstance(result, fx.Proxy) else result


def _rounded(
    function: Callable[[float], int], number: fx.Proxy | float, dtype: torch.dtype
) -> fx.Proxy | int:
    if not isinstance(number, fx.Proxy):
        return function(number)
    return number.tracer.create_proxy("call_function", function, (number,), {})
