"""Symbols of symbolic sizes: their ranges and hints, and new symbols."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)

from dlinfer.graph.torch_private.dynamo import source_name

__all__ = [
    "SYMBOL",
    "ShapeEnv",
    "declared_range",
    "example_number",
    "expression_of",
    "fake_of_any_length",
    "fixed_size",
    "free_unbacked_symbols",
    "fresh_symbol",
    "lowest_size",
    "multiple_of",
    "new_symbol",
    "plain_symbol",
    "same_expression",
    "size_range",
    "sized_symbols",
    "symbol_ranges",
    "symbolic_number",
    "symbols_of",
]


SYMBOL = re.compile(r"\b[suz]\d+\b")
"""The name of a symbol in text."""


def symbols_of(value: object) -> list[Any]:
    """The symbols of a fake tensor's sizes and strides or of a symbolic number, in order."""
    numbers = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
    return [
        symbol
        for number in numbers
        if isinstance(number, torch.SymInt)
        for symbol in sorted(number.node.expr.free_symbols, key=str)
    ]


def plain_symbol(value: object) -> Any:
    """The symbol of a symbolic number that is a single symbol; else None."""
    if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
        return value.node.expr
    return None


def expression_of(value: object) -> object:
    """The sympy expression of a symbolic number; another value itself. Comparing two of them adds no guard."""
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def same_expression(one: object, other: object) -> bool:
    """Whether two sizes or strides are equal for every value of their symbols. Adds no guard."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    terms: list[Any] = [expression_of(one), expression_of(other)]
    if terms[0] == terms[1]:
        return True
    # Equal expressions may be written differently: 8*(n + 1) is 8*n + 8.
    return (terms[0] - terms[1]).expand() == 0


def multiple_of(size: object, other: object) -> float | None:
    """The quotient of two sizes, where it is the same for every value of their symbols. Adds no guard."""
    import sympy

    terms: list[Any] = [
        value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)
        for value in (size, other)
    ]
    quotient = terms[0] / terms[1]
    return float(quotient) if quotient.is_number and quotient.is_finite else None


def fresh_symbol(mode: FakeTensorMode, symbol: Any, environment: ShapeEnv, number: int) -> Any:
    """A new symbol of ``mode`` with the range and the hint of ``symbol``."""
    hint = environment.backed_var_to_val.get(symbol)
    return _create(mode, number, environment.var_to_range[symbol], None if hint is None else int(hint))


def new_symbol(
    mode: FakeTensorMode, number: int, low: int, high: int | None, hint: int | None
) -> torch.SymInt:
    """A new symbolic size. One that may be 0 or 1 is unbacked, so that neither value is specialized."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    hint = None if low < 2 else hint
    symbol = _create(mode, number, ValueRanges(low, int_oo if high is None else high), hint)
    assert mode.shape_env is not None
    made: Any = mode.shape_env.create_symintnode(symbol, hint=hint)
    return made


def _create(mode: FakeTensorMode, number: int, limits: Any, hint: int | None) -> Any:
    """A new symbol in a range; an unbacked one where there is no hint."""
    from torch._dynamo.source import LocalSource

    env = mode.shape_env
    assert env is not None
    if hint is None:
        with env.ignore_fresh_unbacked_symbols():  # an input brings it, not a node
            made = env.create_unbacked_symint().node.expr
    else:
        made = env.create_symbol(
            hint,
            LocalSource(f"n{number}"),
            DimDynamic.DYNAMIC,
            positive=bool(limits.lower > 0) or None,
            do_not_specialize_zero_one=bool(limits.lower < 2),
        )
    ranges: dict[Any, Any] = env.var_to_range
    ranges[made] = limits
    return made


def symbolic_number(mode: FakeTensorMode, value: torch.SymInt, fresh: dict[Any, Any]) -> Any:
    """``value`` over the fresh symbols."""
    assert mode.shape_env is not None
    expression = value.node.expr.xreplace(fresh)
    return mode.shape_env.create_symintnode(expression, hint=value.node.hint)


def fake_of_any_length(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake of a tensor whose first size is a symbol, shared by equal sizes; 0 and 1 are specialized."""
    kinds = [DimDynamic.STATIC if dim else DimDynamic.DUCK for dim in range(tensor.dim())]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(kinds))


def fixed_size(size: Any) -> int | None:
    """A size that is a number, or was specialized to one; None for a size that may vary."""
    if isinstance(size, torch.SymInt):
        return int(size.node.expr) if size.node.expr.is_number else None
    return size


def example_number(number: int | torch.SymInt, unknown: int = 0) -> int:
    """The hint of a symbolic number; ``unknown`` where it has none."""
    if not isinstance(number, torch.SymInt):
        return number
    return int(number.node.hint) if number.node.has_hint() else unknown


def size_range(size: Any) -> int | tuple[int, int | None]:
    """A size, or the range of a symbolic one. A bound that sympy cannot compute is 0 or None."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    limits = size.node.shape_env.bound_sympy(size.node.expr)
    low, high = limits.lower, limits.upper
    return int(low) if low.is_Integer else 0, int(high) if high.is_Integer else None


def lowest_size(size: object) -> int:
    """The smallest that a size may be."""
    found = size_range(size)
    return found if isinstance(found, int) else found[0]


def declared_range(
    symbol: Any, mode: FakeTensorMode, declared: Mapping[Any, Any]
) -> tuple[int, int | None, int | None]:
    """(lowest, highest or None, hint or None) of a symbol, from the declared range before the inferred one.

    torch.export traces with every size at 2 or more, and widens the range to the declared one afterwards.
    """
    env = mode.shape_env
    assert env is not None
    limits = declared.get(symbol, env.var_to_range[symbol])
    high = int(limits.upper) if limits.upper.is_Integer else None
    hint = env.backed_var_to_val.get(symbol)
    return max(0, int(limits.lower)), high, None if hint is None else int(hint)


def symbol_ranges(fakes: Sequence[object]) -> dict[str, str]:
    """The range of each symbol in the inputs' sizes, as text."""
    ranges: dict[str, str] = {}
    for value in fakes:
        numbers = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
        for number in numbers:
            if isinstance(number, torch.SymInt):
                for symbol in number.node.expr.free_symbols:
                    limits = number.node.shape_env.var_to_range.get(symbol)
                    ranges[str(symbol)] = str(limits)
    return ranges


def sized_symbols(mode: FakeTensorMode) -> dict[str, str]:
    """Each symbolic integer of the inputs: its range and its source."""
    from torch.utils._sympy.numbers import int_oo

    environment = mode.shape_env
    assert environment is not None
    found = {}
    for symbol, sources in environment.var_to_sources.items():
        limits = environment.var_to_range.get(symbol)
        if limits is None or not sources or not symbol.is_integer:
            continue
        values = f"{limits.lower} to {limits.upper}"
        if limits.lower == limits.upper:
            values = str(limits.lower)
        elif limits.upper == int_oo:
            values = "any" if limits.lower == -int_oo else f"{limits.lower} and more"
        found[str(symbol)] = f"{values}, {source_name(sources[0].name)}"
    return found
