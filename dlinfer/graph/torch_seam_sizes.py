"""The seam's second file: the private parts of torch that graphs in files need, for symbolic sizes and for ops.

``tests/graph/test_torch_seam_sizes.py`` uses each of them on a small case, as for ``torch_seam``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from dlinfer.graph.size_text import Size, SizeTextError


def strict_mode() -> FakeTensorMode:
    """A fake mode with symbols of its own, in which no op runs for real and no real tensor is taken."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False, allow_fallback_kernels=False)


def symbols_of(value: Any) -> list[Any]:
    """The symbols of a fake tensor's sizes and strides or of a symbolic number, in the order of their mention."""
    numbers = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
    return [
        symbol
        for number in numbers
        if isinstance(number, torch.SymInt)
        for symbol in sorted(number.node.expr.free_symbols, key=str)
    ]


def declared_range(
    symbol: Any, mode: FakeTensorMode, declared: Mapping[Any, Any]
) -> tuple[int, int | None, int | None]:
    """(lowest, highest or None, example or None) of a symbol; what torch.export was told goes before what it found.

    torch.export takes every size for 2 or more while it looks, and widens the range to what it was told afterwards.
    """
    env = mode.shape_env
    assert env is not None
    limits = declared.get(symbol, env.var_to_range[symbol])
    high = int(limits.upper) if limits.upper.is_Integer else None
    hint = env.backed_var_to_val.get(symbol)
    return max(0, int(limits.lower)), high, None if hint is None else int(hint)


def from_on(limits: Any, low: int) -> Any:
    """A range of torch.export's without what lies below ``low``."""
    from torch.utils._sympy.value_ranges import ValueRanges

    return ValueRanges(low, limits.upper)


def new_symbol(
    mode: FakeTensorMode, number: int, low: int, high: int | None, hint: int | None
) -> torch.SymInt:
    """A symbolic size. Where it may be 0 or 1 nothing is assumed of it, not even that it is not 1."""
    from torch._dynamo.source import LocalSource
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    env = mode.shape_env
    assert env is not None
    if low < 2 or hint is None:
        with env.ignore_fresh_unbacked_symbols():  # it comes from an input, not from a node
            made = env.create_unbacked_symint()
        symbol = made.node.expr
    else:
        symbol = env.create_symbol(hint, LocalSource(f"n{number}"), DimDynamic.DYNAMIC)
        made: Any = env.create_symintnode(symbol, hint=hint)
    ranges: dict[Any, Any] = env.var_to_range
    ranges[symbol] = ValueRanges(low, int_oo if high is None else high)
    return made


def to_size(number: int | torch.SymInt, names: Mapping[Any, str]) -> Size:
    """A size over names for its symbols. Raises SizeTextError where it has no such form."""
    return Size(number) if isinstance(number, int) else _translated(number.node.expr, names)


def conditions_of(mode: FakeTensorMode, names: Mapping[Any, str]) -> list[Size]:
    """What was assumed of the symbols of ``names`` so far, and what was left to be checked at each call.

    Raises SizeTextError where it also speaks of other symbols or has no such form.
    """
    env = mode.shape_env
    assert env is not None
    left = [assertion.expr for found in env.deferred_runtime_asserts.values() for assertion in found]
    assumed = [guard.expr for guard in env.guards if all(s.is_integer for s in guard.expr.free_symbols)]
    conditions: dict[str, Size] = {}
    for expression in (*assumed, *(one for one in left if one.free_symbols <= set(names))):
        # A symbol that turned out equal to another stands nowhere any more: not in a size, so not in a condition.
        for part in _conjuncts(env.simplify(expression)):
            found = _translated(part, names)
            conditions[str(found)] = found
    return list(conditions.values())


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


def is_dispatched(name: str) -> bool:
    """Whether an op, ``aten::add.Tensor``, is one of torch's dispatcher; TorchScript has others, ``aten::save``."""
    return torch._C._dispatch_has_kernel(name)


def undecided_errors() -> tuple[type[Exception], ...]:
    """What fake ops raise where they would have to know a size that is only known at each call."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (GuardOnDataDependentSymNode,)


def fake_of_any_length(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake of a tensor whose first size is a symbol, one for equal sizes; 0 and 1 stay what they are."""
    from torch.fx.experimental.symbolic_shapes import StatelessSymbolicContext

    kinds = [DimDynamic.STATIC if dim else DimDynamic.DUCK for dim in range(tensor.dim())]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(kinds))
