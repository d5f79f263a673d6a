"""Reductions over dimensions, and cumulative sums."""

from collections.abc import Sequence
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.graph.torch_private.symbols import fixed_size, size_range
from dlinfer.vendor.openvino import dtypes
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.dtypes import SHORT
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.lowerings.ordering import sorted_first
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import Build, Call, lowers, unless
from dlinfer.vendor.openvino.workarounds.precision import kept_wide

aten = torch.ops.aten


def axes_of(x: Output, dim: Any) -> list[int]:
    """Return the dimensions that a ``dim`` argument names: all of them for None and for an empty list."""
    if dim is None or dim == [] or not rank(x):
        return list(range(rank(x)))
    return [int(axis) % rank(x) for axis in (dim if isinstance(dim, Sequence) else [dim])]


def _sum(b: Builder, x: Output, axes: Sequence[int], keep: bool) -> Output:
    """Sum in x's type. Integers are summed exactly: the result is the last of their cumulative sums."""
    if x.get_element_type().is_real() or not axes:
        return op.reduce_sum(x, b.axes(axes), keep).output(0) if axes else x
    zero = b.scalar(0, x.get_element_type())
    for axis in axes:
        begins = [int(dim == axis) for dim in range(rank(x))]  # a leading 0 makes a sum over nothing 0
        padded = op.pad(x, b.axes(begins), b.axes([0] * rank(x)), "constant", zero)
        along = b.scalar(axis, ov.Type.i64)
        x = op.gather(op.cum_sum(padded, along), b.axes([-1]), along).output(0)
    return x if keep else op.squeeze(x, b.axes(axes)).output(0)


def _at_most(b: Builder, axes: Sequence[int], number: int) -> bool:
    """Return whether these dimensions of ``self`` can have at most ``number`` elements together, at every call."""
    total = 1
    for axis in axes:
        _, highest = size_range(b.call.fake("self").shape[axis])
        if highest is None or highest > number:
            return False
        total *= highest
    return total <= number


@lowers(aten.sum.default, aten.sum.dim_IntList)
def sum_(b: Builder, x: Output, *, dim: Any = None, keepdim: bool = False) -> Output:
    axes = axes_of(x, dim)
    if x.get_element_type() == ov.Type.boolean and axes and _at_most(b, axes, 1 << 24):
        # float32 holds the count
        return b.cast(op.reduce_sum(b.cast(x, ov.Type.f32), b.axes(axes), keepdim).output(0), b.kind)
    return b.cast(_sum(b, b.cast(x, integers.computed_in(b.kind)), axes, keepdim), b.kind)


@lowers(aten.mean.default, aten.mean.dim)
def mean(b: Builder, x: Output, *, dim: Any = None, keepdim: bool = False) -> Output:
    x = b.cast(x, b.kind)
    axes = axes_of(x, dim)
    if not axes:
        return x
    sizes = b.call.fake("self").shape
    if all((fixed_size(sizes[axis]) or 0) > 0 for axis in axes):
        return op.reduce_mean(x, b.axes(axes), keepdim).output(0)
    # The mean of no elements is NaN; OpenVINO's own mean returns 0.
    return op.divide(op.reduce_sum(x, b.axes(axes), keepdim), count(b, x, axes, b.kind)).output(0)


def count(b: Builder, x: Output, axes: Sequence[int], kind: ov.Type) -> Output:
    shape = op.gather(op.shape_of(x, "i64"), b.axes(axes), b.scalar(0, ov.Type.i64))
    return b.cast(op.reduce_prod(shape, b.axes([0]), False).output(0), kind)


def _extreme(b: Builder, x: Output, axes: Sequence[int], keep: bool, largest: bool) -> Output:
    """Return the largest or smallest element, exact for integers and infinities too.

    OpenVINO's reductions start from the lowest finite number, and compute integers in float32. So this sorts instead.
    Sorting skips NaN, so NaN is put in afterwards."""
    result = x
    for axis in axes:
        result, _ = sorted_first(b, result, 1, axis, largest)
    if axes and x.get_element_type().is_real():
        none = op.reduce_logical_or(op.is_nan(x), b.axes(axes), True)
        result = op.select(none, b.scalar(float("nan"), x.get_element_type()), result).output(0)
    return result if keep or not axes else op.squeeze(result, b.axes(axes)).output(0)


def _reduced_bools(b: Builder, x: Output, axes: Sequence[int], keep: bool, largest: bool) -> Output:
    if not axes:
        return x
    both = op.reduce_logical_or if largest else op.reduce_logical_and
    return both(x, b.axes(axes), keep).output(0)


def _amax(largest: bool) -> Build:
    def build(b: Builder, x: Output, dim: Any = None, keepdim: bool = False) -> Output:
        axes = axes_of(x, dim)
        if b.kind == ov.Type.boolean:
            return _reduced_bools(b, x, axes, keepdim, largest)
        kind = integers.computed_in(b.kind)
        return b.cast(_extreme(b, b.cast(x, kind), axes, keepdim, largest), b.kind)

    return build


lowers(aten.amax.default, aten.max.default)(_amax(True))
lowers(aten.amin.default, aten.min.default)(_amax(False))


@lowers(aten.aminmax.default)
def aminmax(b: Builder, x: Output, dim: Any = None, keepdim: bool = False) -> list[Output]:
    axes = axes_of(x, dim)
    return [_extreme(b, x, axes, keepdim, largest) for largest in (False, True)]


def _any(largest: bool) -> Build:
    def build(b: Builder, x: Output, dim: Any = None, keepdim: bool = False) -> Output:
        result = _reduced_bools(b, b.cast(x, ov.Type.boolean), axes_of(x, dim), keepdim, largest)
        return b.cast(result, b.kind)

    return build


lowers(aten.any.default, aten.any.dim, aten.any.dims)(_any(True))
lowers(aten.all.default, aten.all.dim, aten.all.dims)(_any(False))


_floats = unless(
    lambda call: call.result.is_floating_point(), "it multiplies integers, which OpenVINO computes in float32"
)


@lowers(aten.prod.default, aten.prod.dim_int, refuses=_floats)
def prod(b: Builder, x: Output, *, dim: Any = None, keepdim: bool = False) -> Output:
    axes = axes_of(x, dim)
    x = b.cast(x, b.kind)
    return op.reduce_prod(x, b.axes(axes), keepdim).output(0) if axes else x


def moments(b: Builder, x: Output, axes: Sequence[int], correction: Any) -> tuple[Output, Output]:
    """Return two tensors, variance and mean, in float32 and with the reduced dimensions kept as size 1."""
    x = b.cast(x, ov.Type.f32)
    number = count(b, x, axes, ov.Type.f32)
    mean = op.divide(op.reduce_sum(x, b.axes(axes), True), number).output(0)
    off = op.subtract(x, mean)
    free = op.maximum(
        op.subtract(number, b.scalar(float(correction), ov.Type.f32)), b.scalar(0.0, ov.Type.f32)
    )
    return op.divide(op.reduce_sum(op.multiply(off, off), b.axes(axes), True), free).output(0), mean


def _finished(b: Builder, value: Output, axes: Sequence[int], keep: bool, kind: ov.Type) -> Output:
    result = value if keep else op.squeeze(value, b.axes(axes)).output(0)
    return b.cast(result, kind)


def _variance(root: bool, with_mean: bool) -> Build:
    """Return a lowering of the variance or, if ``root``, of the deviation; if ``with_mean``, also of the mean.

    ``unbiased=False`` of torch's op means correction 0.
    """

    def build(
        b: Builder,
        x: Output,
        *,
        dim: Any = None,
        correction: Any = None,
        unbiased: bool = True,
        keepdim: bool = False,
    ) -> Output | list[Output]:
        axes = axes_of(x, dim)
        variance, mean = moments(b, x, axes, int(unbiased) if correction is None else correction)
        statistics = [op.sqrt(variance).output(0) if root else variance, mean]
        if not with_mean:
            return _finished(b, statistics[0], axes, keepdim, b.kind)
        b.fault(op.is_inf(mean).output(0), "the mean of a variance is infinite, where torch may return NaN")
        kind = dtypes.type_of(b.call.result[0].dtype)
        return [_finished(b, value, axes, keepdim, kind) for value in statistics]

    return build


for _packet, _root, _with_mean in (
    (aten.var, False, False),
    (aten.std, True, False),
    (aten.var_mean, False, True),
    (aten.std_mean, True, True),
):
    lowers(_packet.default, _packet.dim, _packet.correction)(_variance(_root, _with_mean))


@lowers(aten.cumsum.default)
def cumsum(b: Builder, x: Output, dim: int, dtype: Any = None) -> Output:
    kind = ov.Type.f32 if b.kind in SHORT else integers.computed_in(b.kind)
    if not rank(x):
        return b.cast(x, b.kind)
    summed = kept_wide(op.cum_sum(b.cast(x, kind), b.scalar(dim % rank(x), ov.Type.i64)))
    return b.cast(summed.output(0), b.kind)


def _known_norm(call: Call) -> str | None:
    order = call.fake("ord" if "ord" in call.arguments else "p")
    return None if order in (None, 1, 2, "fro") else f"the norm has order {order}"


@lowers(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar, refuses=_known_norm)
def norm(b: Builder, x: Output, order: Any = 2, *, dim: Any = None, keepdim: bool = False) -> Output:
    x, axes = b.cast(x, ov.Type.f32), b.axes(axes_of(x, dim))
    if not rank(x):
        result = op.abs(x)
    elif order == 1:
        result = op.reduce_sum(op.abs(x), axes, keepdim)
    else:
        result = op.sqrt(op.reduce_sum(op.multiply(x, x), axes, keepdim))
    return b.cast(result.output(0), b.kind)


@lowers(aten.logsumexp.default)
def logsumexp(b: Builder, x: Output, dim: Any, keepdim: bool = False) -> Output:
    axes = axes_of(x, dim)
    x = b.cast(x, ov.Type.f32)
    if not axes:
        return b.cast(x, b.kind)
    high = _extreme(b, x, axes, True, True)
    zero = b.scalar(0.0, ov.Type.f32)
    infinite = op.equal(op.abs(high), b.scalar(float("inf"), ov.Type.f32))
    base = op.select(infinite, zero, high)
    result = op.add(op.log(op.reduce_sum(op.exp(op.subtract(x, base)), b.axes(axes), True)), base)
    result = op.select(op.is_nan(high), high, result)  # OpenVINO's Exp loses NaN
    return _finished(b, result.output(0), axes, keepdim, b.kind)
