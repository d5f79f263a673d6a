"""Sizes and conditions on them as text, for files: integers, symbols, ``+ - * // %``, min, max and comparisons.

What is read from a file is never given to Python's own parser. The values of symbols may be integers or torch's
symbolic ones.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_LONGEST = 4_000
_MOST_TOKENS = 250  # each level of an expression needs two, so evaluating one cannot exhaust Python's stack
_LARGEST = (1 << 63) - 1

_TOKEN = re.compile(r"\s*(?:(\d+)|([a-z]\w*)|(//|==|!=|<=|>=|[-+*%(),<>]))", re.ASCII)
_FUNCTIONS = ("min", "max")
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "neg": operator.neg,
    "min": lambda *values: _extreme(torch.sym_min, min, values),
    "max": lambda *values: _extreme(torch.sym_max, max, values),
}


Bounds = tuple[int | None, int | None]
"""The lowest and the highest that a size may be; None where there is none."""


class SizeTextError(ValueError):
    """Text that is no size and no condition."""


@dataclass(frozen=True)
class Size:
    """An expression: ``what`` is a number, the name of a symbol, or an operation on ``parts``."""

    what: int | str
    parts: tuple["Size", ...] = ()

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """Its value. Raises KeyError for a symbol without one and ZeroDivisionError."""
        if isinstance(self.what, int):
            return self.what
        if not self.parts:
            return values[self.what]
        function = _ARITHMETIC.get(self.what) or _COMPARISONS[self.what]
        return function(*(part.evaluate(values) for part in self.parts))

    def bounds(self, ranges: Mapping[str, "Bounds"]) -> "Bounds":
        """The lowest and highest that it can be, each symbol for itself within its range."""
        if isinstance(self.what, int):
            return self.what, self.what
        if not self.parts:
            return ranges[self.what]
        return _BOUNDS[self.what]([part.bounds(ranges) for part in self.parts])

    def symbols(self) -> Iterator[str]:
        """The names of its symbols, from left to right, as often as they occur."""
        if isinstance(self.what, str) and not self.parts:
            yield self.what
        for part in self.parts:
            yield from part.symbols()

    @property
    def symbol(self) -> str | None:
        """The symbol that it is, where it is nothing but one."""
        return self.what if isinstance(self.what, str) and not self.parts else None

    def __str__(self) -> str:
        if not self.parts:
            return str(self.what)
        if self.what == "neg":
            return f"-{_bracketed(self.parts[0])}"
        if self.what in _FUNCTIONS:
            return f"{self.what}({', '.join(map(str, self.parts))})"
        return f" {self.what} ".join(map(_bracketed, self.parts))


def _bracketed(size: Size) -> str:
    simple = not size.parts or size.what in _FUNCTIONS
    return str(size) if simple else f"({size})"


def _extreme(symbolic: Callable[..., Any], plain: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    if not any(isinstance(value, torch.SymInt) for value in values):
        return plain(values)
    result = values[0]
    for value in values[1:]:
        result = symbolic(result, value)
    return result


def _ends(part: Bounds) -> tuple[Any, Any]:
    low, high = part
    return -math.inf if low is None else low, math.inf if high is None else high


def _within(low: Any, high: Any) -> Bounds:
    return None if low == -math.inf else low, None if high == math.inf else high


def _sum(parts: list[Bounds]) -> Bounds:
    (a, b), (c, d) = map(_ends, parts)
    return _within(a + c, b + d)


def _difference(parts: list[Bounds]) -> Bounds:
    (a, b), (c, d) = map(_ends, parts)
    return _within(a - d, b - c)


def _product(parts: list[Bounds]) -> Bounds:
    corners = [0 if 0 in (x, y) else x * y for x in _ends(parts[0]) for y in _ends(parts[1])]
    return _within(min(corners), max(corners))


def _quotient(parts: list[Bounds]) -> Bounds:
    (a, b), (c, d) = map(_ends, parts)
    if a < 0 or c < 1:
        return None, None
    return (0 if d == math.inf else a // d), (None if b == math.inf else b // c)


def _rest(parts: list[Bounds]) -> Bounds:
    low, high = _ends(parts[1])
    return (0, None if high == math.inf else high - 1) if low > 0 else (None, None)


def _extremes(choose: Callable[[list[Any]], Any]) -> Callable[[list[Bounds]], Bounds]:
    return lambda parts: _within(choose([_ends(p)[0] for p in parts]), choose([_ends(p)[1] for p in parts]))


_BOUNDS: dict[str, Callable[[list[Bounds]], Bounds]] = {
    "+": _sum,
    "-": _difference,
    "*": _product,
    "//": _quotient,
    "%": _rest,
    "neg": lambda parts: _difference([(0, 0), *parts]),
    "min": _extremes(min),
    "max": _extremes(max),
}


def parse_size(text: object) -> Size:
    """The size that ``text`` (or an integer) is. Raises SizeTextError."""
    if isinstance(text, int) and not isinstance(text, bool):
        return Size(_number(text))
    return _Reader(text).whole(_Reader.size)


def parse_condition(text: object) -> Size:
    """The comparison of two sizes that ``text`` is. Raises SizeTextError."""
    return _Reader(text).whole(_Reader.condition)


def _number(value: int) -> int:
    if not -_LARGEST <= value <= _LARGEST:
        raise SizeTextError("a number beyond 64 bits")
    return value


class _Reader:
    """One text, token by token."""

    def __init__(self, text: object) -> None:
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise SizeTextError("not a text, or one that is too long")
        self.tokens: list[tuple[str, str]] = []
        place = 0
        while place < len(text.rstrip()):
            found = _TOKEN.match(text, place)
            if found is None:
                raise SizeTextError(f"unknown at {text[place : place + 10]!r}")
            place = found.end()
            kind = ("number", "name", "sign")[(found.lastindex or 1) - 1]
            self.tokens.append((kind, found.group(found.lastindex or 0)))
            if len(self.tokens) > _MOST_TOKENS:
                raise SizeTextError("it is too long")
        self.next = 0

    def whole(self, rule: "Callable[[_Reader], Size]") -> Size:
        result = rule(self)
        if self.next < len(self.tokens):
            raise SizeTextError(f"{self.tokens[self.next][1]!r} after the end")
        return result

    def condition(self) -> Size:
        left = self.size()
        sign = self.sign(*_COMPARISONS)
        if sign is None:
            raise SizeTextError("no comparison")
        return Size(sign, (left, self.size()))

    def size(self) -> Size:
        return self.chain(self.term, "+", "-")

    def term(self) -> Size:
        return self.chain(self.factor, "*", "//", "%")

    def chain(self, part: Callable[[], Size], *signs: str) -> Size:
        result = part()
        while (sign := self.sign(*signs)) is not None:
            result = Size(sign, (result, part()))
        return result

    def factor(self) -> Size:
        minus = 0
        while self.sign("-") is not None:
            minus += 1
        result = self.atom()
        return Size("neg", (result,)) if minus % 2 else result

    def atom(self) -> Size:
        kind, text = self.take()
        if kind == "number":
            if len(text) > 19:
                raise SizeTextError("a number beyond 64 bits")
            return Size(_number(int(text)))
        if kind == "name" and text not in _FUNCTIONS:
            return Size(text)
        if kind == "name":
            self.need("(")
            parts = [self.size()]
            while self.sign(",") is not None:
                parts.append(self.size())
            self.need(")")
            return Size(text, tuple(parts))
        if text != "(":
            raise SizeTextError(f"{text!r} where a size should be")
        result = self.size()
        self.need(")")
        return result

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
