"""Rules for aten's ops: the interval of a result from the intervals of its operands (``int_ranges.ranges``)."""

from collections.abc import Callable, Mapping
from typing import Any

from dlinfer.vendor.openvino.int_ranges.kept import Interval

KEEPS = frozenset(
    [
        *"view reshape _unsafe_view _reshape_alias view_as reshape_as flatten unflatten squeeze unsqueeze".split(),
        *"ravel permute transpose swapaxes swapdims t numpy_T mT adjoint movedim moveaxis expand".split(),
        *"broadcast_to expand_as cat concat concatenate stack repeat tile repeat_interleave flip roll".split(),
        *"slice narrow select unbind split_with_sizes split chunk unsafe_chunk tensor_split unfold".split(),
        *"diagonal index _unsafe_index index_select gather take take_along_dim embedding amax amin".split(),
        *"aminmax clone contiguous detach alias lift_fresh lift_fresh_copy resolve_conj resolve_neg".split(),
        *"to _to_copy type_as copy positive floor ceil round trunc fix slice_scatter select_scatter".split(),
        *"index_copy where masked_fill index_fill pad constant_pad_nd tril triu relu full full_like".split(),
        *"fill new_full zeros zeros_like zero new_zeros ones ones_like new_ones scalar_tensor".split(),
        *"maximum minimum clamp clip clamp_min clamp_max".split(),
    ]
)
"""Ops that select: each result is 0, 1 or an element of an operand."""

PLACES = frozenset("index indices condition mask n elements".split())
"""Parameters that are never elements of the result."""

NUMBERS = frozenset("self other value fill_value s min max".split())
"""Parameters of ``KEEPS`` ops that may be Python numbers; such a number may be an element of the result."""


def hull(*intervals: Interval) -> Interval:
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def _add(x: Interval, y: Interval) -> Interval:
    return x[0] + y[0], x[1] + y[1]


def _neg(x: Interval) -> Interval:
    return -x[1], -x[0]


def _mul(x: Interval, y: Interval) -> Interval:
    corners = [left * right for left in x for right in y]
    return min(corners), max(corners)


def many(x: Interval, number: int) -> Interval:
    """Return the interval of a sum of at most ``number`` terms, each within ``x``."""
    return min(0, x[0] * number), max(0, x[1] * number)


def _abs(x: Interval) -> Interval:
    size = max(abs(x[0]), abs(x[1]))
    return -size, size


def _power(x: Interval, exponent: Any) -> Interval:
    times = exponent[1] if isinstance(exponent, tuple) else int(exponent)
    return hull((1, 1), *(_product(x, count) for count in range(1, times + 1)))


def _product(x: Interval, times: int) -> Interval:
    power = x
    for _ in range(times - 1):
        power = _mul(power, x)
    return power


def _bits(x: Interval, y: Interval) -> Interval:
    bits = max(number.bit_length() for number in (*x, *y))
    return (0 if min(x[0], y[0]) >= 0 else -(1 << bits)), (1 << bits) - 1


def _and(x: Interval, y: Interval) -> Interval:
    positive = [interval[1] for interval in (x, y) if interval[0] >= 0]
    return (0, min(positive)) if positive else _bits(x, y)


_ONE: Interval = (1, 1)
_RULES: Mapping[str, Callable[[Mapping[str, Any]], Interval]] = {
    "add": lambda a: _add(a["self"], _mul(a["other"], a.get("alpha", _ONE))),
    "sub": lambda a: _add(a["self"], _neg(_mul(a["other"], a.get("alpha", _ONE)))),
    "rsub": lambda a: _add(a["other"], _neg(_mul(a["self"], a.get("alpha", _ONE)))),
    "mul": lambda a: _mul(a["self"], a["other"]),
    "neg negative": lambda a: _neg(a["self"]),
    "abs absolute floor_divide div fmod": lambda a: _abs(a["self"]),
    "square": lambda a: _mul(a["self"], a["self"]),
    "pow": lambda a: _power(a["self"], a["exponent"]),
    "addcmul": lambda a: _add(a["self"], _mul(a.get("value", _ONE), _mul(a["tensor1"], a["tensor2"]))),
    "outer ger": lambda a: _mul(a["self"], a["vec2"]),
    "remainder": lambda a: _abs(a["other"]) if a["other"][0] <= 0 else (0, a["other"][1] - 1),
    "bitwise_and __and__": lambda a: _and(a["self"], a["other"]),
    "bitwise_or __or__ bitwise_xor __xor__": lambda a: _bits(a["self"], a["other"]),
    "bitwise_not": lambda a: (~a["self"][1], ~a["self"][0]),
    "sign sgn": lambda a: (-1, 1),
    "one_hot eye": lambda a: (0, 1),
    "arange": lambda a: hull(a.get("start", (0, 0)), a["end"]),
    "cumsum": lambda a: hull(a["self"], many(a["self"], a["elements"])),
    "sum": lambda a: many(a["self"], a["elements"]),
    "diff": lambda a: _mul(_abs(hull(*_tensors(a))), (1 << a["n"][1],) * 2),
    "index_add": lambda a: _add(a["self"], many(_mul(a["source"], a.get("alpha", _ONE)), a["elements"])),
    "scatter_add scatter_reduce": lambda a: _add(a["self"], many(a["src"], a["elements"])),
    "index_put": lambda a: _add(a["self"], many(a["values"], a["elements"])),
    "argmax argmin argsort bucketize": lambda a: (0, a["elements"]),
}
ARITHMETIC = {name: rule for names, rule in _RULES.items() for name in names.split()}
"""Op -> function that takes the intervals of the op's arguments and returns the interval of its result.

The argument ``elements`` is a number, not an interval: the op adds up or counts at most so many elements."""

ORDERS = frozenset(("sort", "topk", "max", "min"))


def _tensors(arguments: Mapping[str, Any]) -> list[Interval]:
    return [value for name, value in arguments.items() if name not in PLACES]
