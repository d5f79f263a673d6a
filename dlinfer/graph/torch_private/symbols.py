"""Symbols of symbolic sizes: their ranges and hints, and new symbols."""

# sympy and torch's symbolic numbers have no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from dlinfer.graph.torch_private.dynamo import source_name
from dlinfer.graph.torch_private.expressions import Expression, bounds_of, value_range
from dlinfer.graph.torch_private.fake_mode import environment_of

__all__ = ["ShapeEnv", "free_unbacked_symbols"]

SYMBOL = re.compile(r"\b[suz]\d+\b")
"""The pattern of a symbol's name in text."""


def _symbolic_sizes(value: object) -> Iterator[torch.SymInt]:
    numbers = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
    yield from (number for number in numbers if isinstance(number, torch.SymInt))


def symbols_of(value: object) -> list[Expression]:
    """Return the symbols in a fake tensor's sizes and strides, or in a symbolic number, in order."""
    return [
        symbol
        for number in _symbolic_sizes(value)
        for symbol in sorted(number.node.expr.free_symbols, key=str)
    ]


def plain_symbol(value: object) -> Expression | None:
    """Return the symbol if the value is a symbolic integer of a single symbol, else None."""
    if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
        return value.node.expr
    return None


def expression_of(value: object) -> Expression:
    """Return the sympy expression of a symbolic number; any other value is returned itself.

    Comparing the results adds no guard.
    """
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def same_expression(left: object, right: object) -> bool:
    """Return whether two sizes or strides are equal for every value of their symbols. Adds no guard."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    first, second = expression_of(left), expression_of(right)
    # Equal expressions may be written differently: 8*(n + 1) is 8*n + 8.
    return first == second or (first - second).expand() == 0


def multiple_of(size: int | torch.SymInt, other: int | torch.SymInt) -> float | None:
    """Return ``size / other`` if it is the same for every value of the symbols, else None. Adds no guard."""
    quotient = sympy.sympify(expression_of(size)) / expression_of(other)
    return float(quotient) if quotient.is_number and quotient.is_finite else None


def fresh_symbol(mode: FakeTensorMode, symbol: Expression, environment: ShapeEnv, number: int) -> Expression:
    """Return a new symbol of ``mode`` with the range and the hint of ``symbol``.

    environment: the ShapeEnv of ``symbol``. number: makes the new symbol's source unique.
    """
    return _create(mode, number, environment.var_to_range[symbol], _hint(symbol, environment))


def new_symbol(
    mode: FakeTensorMode, number: int, low: int, high: int | None, hint: int | None
) -> torch.SymInt:
    """Return a new symbolic size from ``low`` to ``high``.

    If the size may be 0 or 1, it is unbacked, so that torch specializes on neither value.
    number: makes the size's source unique. hint: the size's value in the captured call.
    """
    hint = None if low < 2 else hint
    symbol = _create(mode, number, value_range(low, high), hint)
    size: Any = environment_of(mode).create_symintnode(symbol, hint=hint)
    return size


def _create(mode: FakeTensorMode, number: int, limits: ValueRanges[Any], hint: int | None) -> Expression:
    """Return a new symbol with the range ``limits``. The symbol is unbacked if ``hint`` is None."""
    from torch._dynamo.source import LocalSource

    env = environment_of(mode)
    symbol: Expression
    if hint is None:
        with env.ignore_fresh_unbacked_symbols():  # an input brings it, not a node
            symbol = env.create_unbacked_symint().node.expr
    else:
        symbol = env.create_symbol(
            hint,
            LocalSource(f"n{number}"),
            DimDynamic.DYNAMIC,
            positive=bool(limits.lower > 0) or None,
            do_not_specialize_zero_one=bool(limits.lower < 2),
        )
    env.var_to_range[symbol] = limits
    return symbol


def _hint(symbol: Expression, environment: ShapeEnv) -> int | None:
    hint = environment.backed_var_to_val.get(symbol)
    return None if hint is None else int(hint)


def symbolic_number(
    mode: FakeTensorMode, value: torch.SymInt, fresh: Mapping[Expression, Expression]
) -> int | torch.SymInt:
    """Return ``value`` with its symbols replaced. fresh: old symbol -> symbol of ``mode``."""
    return environment_of(mode).create_symintnode(value.node.expr.xreplace(fresh), hint=value.node.hint)


def fake_of_any_length(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake of a tensor with a symbol as its first size, but a first size of 0 or 1 stays a number.

    Tensors of ``mode`` with equal first sizes share the symbol.
    """
    kinds = [DimDynamic.STATIC if dim else DimDynamic.DUCK for dim in range(tensor.dim())]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(kinds))


def fixed_size(size: Any) -> int | None:
    """Return the number of a size that is fixed or was specialized; None for a size that may vary."""
    if isinstance(size, torch.SymInt):
        return int(size.node.expr) if size.node.expr.is_number else None
    return size


def example_number(number: int | torch.SymInt, unknown: int = 0) -> int:
    """Return the hint of a symbolic number, or ``unknown`` if it has none. A plain number is returned unchanged."""
    if not isinstance(number, torch.SymInt):
        return number
    return int(number.node.hint) if number.node.has_hint() else unknown


def size_range(size: int | torch.SymInt) -> tuple[int, int | None]:
    """Return the lowest and highest value of a size. A bound that sympy cannot compute is 0 or None."""
    if not isinstance(size, torch.SymInt):
        return size, size
    low, high = bounds_of(size.node.shape_env.bound_sympy(size.node.expr))
    return low or 0, high


def declared_range(
    symbol: Expression, mode: FakeTensorMode, declared: Mapping[Expression, ValueRanges[Any]]
) -> tuple[int, int | None, int | None]:
    """Return three things about a symbol: its lowest value, its highest value, and its hint.

    The highest value is None without a limit, and the hint is None if it is unknown. The range is the one in
    ``declared`` if there is one, else the range that torch inferred. torch.export traces with every size at 2 or more,
    and widens the range to the user's declared one afterwards.
    """
    env = environment_of(mode)
    limits = declared.get(symbol, env.var_to_range[symbol])
    return max(0, int(limits.lower)), bounds_of(limits)[1], _hint(symbol, env)


def symbol_ranges(fakes: Iterable[object]) -> dict[str, str]:
    """Return symbol -> its range, as text, for the symbols in the sizes and strides of fakes."""
    return {
        str(symbol): str(number.node.shape_env.var_to_range.get(symbol))
        for value in fakes
        for number in _symbolic_sizes(value)
        for symbol in number.node.expr.free_symbols
    }


def sized_symbols(mode: FakeTensorMode) -> dict[str, str]:
    """Return symbol -> its range and its source in the model, as text, for each symbolic integer of the inputs."""
    env = environment_of(mode)
    ranges: dict[str, str] = {}
    for symbol, sources in env.var_to_sources.items():
        limits = env.var_to_range.get(symbol)
        if limits is None or not sources or not symbol.is_integer:
            continue
        values = f"{limits.lower} to {limits.upper}"
        if limits.lower == limits.upper:
            values = str(limits.lower)
        elif limits.upper == int_oo:
            values = "any" if limits.lower == -int_oo else f"{limits.lower} and more"
        ranges[str(symbol)] = f"{values}, {source_name(sources[0].name)}"
    return ranges
