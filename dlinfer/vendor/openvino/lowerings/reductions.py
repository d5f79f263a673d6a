"""Reductions over dimensions, and running ones."""

from collections.abc import Sequence
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.graph.seam.symbols import fixed_size, size_range
from dlinfer.vendor.openvino import dtypes
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.registry import Call, lowers

aten = torch.ops.aten

_LOWEST = torch.finfo(torch.float32).min


def axes_of(b: Builder, x: Output, dim: Any) -> list[int]:
    """The dimensions that a ``dim`` argument names; all for None and for an empty list."""
    rank = len(x.get_partial_shape())
    if dim is None or dim == []:
        return list(range(rank))
    return [int(one) % rank for one in (dim if isinstance(dim, Sequence) else [dim])] if rank else []


def _sum(b: Builder, x: Output, axes: Sequence[int], keep: bool) -> Output:
    """A sum in x's type. Of whole numbers it is the last of the running sums, which are exact."""
    if x.get_element_type().is_real() or not axes:
        return op.reduce_sum(x, b.axes(axes), keep).output(0) if axes else x
    zero = b.scalar(0, x.get_element_type())
    for axis in axes:
        rank = len(x.get_partial_shape())
        begins, ends = [0] * rank, [0] * rank
        begins[axis] = 1  # so that a sum over nothing is 0
        running = op.cum_sum(
            op.pad(x, b.axes(begins), b.axes(ends), "constant", zero), b.scalar(axis, ov.Type.i64)
        )
        last = op.gather(running, b.axes([-1]), b.scalar(axis, ov.Type.i64))
        x = last.output(0)
    return x if keep else op.squeeze(x, b.axes(axes)).output(0)


def _at_most(b: Builder, axes: Sequence[int], number: int) -> bool:
    """Whether some dimensions of the call's input have no more elements together, whatever sizes it gets."""
    total = 1
    for axis in axes:
        size = size_range(b.call.fake("self").shape[axis])
        highest = size if isinstance(size, int) else size[1]
        if highest is None or highest > number:
            return False
        total *= int(highest)
    return total <= number


@lowers(aten.sum.default)
def sum_all(b: Builder, x: Output, dtype: Any = None) -> Output:
    return sum_dims(b, x, None, False, dtype)


@lowers(aten.sum.dim_IntList)
def sum_dims(b: Builder, x: Output, dim: Any, keepdim: bool = False, dtype: Any = None) -> Output:
    kind = integers.computed_in(b.kind)
    axes = axes_of(b, x, dim)
    if (
        x.get_element_type() == ov.Type.boolean and axes and _at_most(b, axes, 1 << 24)
    ):  # float32 holds the count
        return b.cast(op.reduce_sum(b.cast(x, ov.Type.f32), b.axes(axes), keepdim).output(0), b.kind)
    return b.cast(_sum(b, b.cast(x, kind), axes, keepdim), b.kind)


@lowers(aten.mean.default)
def mean_all(b: Builder, x: Output, dtype: Any = None) -> Output:
    return mean_dims(b, x, None, False, dtype)


@lowers(aten.mean.dim)
def mean_dims(b: Builder, x: Output, dim: Any, keepdim: bool = False, dtype: Any = None) -> Output:
    x = b.cast(x, b.kind)
    axes = axes_of(b, x, dim)
    if not axes:
        return x
    sizes = b.call.fake("self").shape
    if all((fixed_size(sizes[axis]) or 0) > 0 for axis in axes):
        return op.reduce_mean(x, b.axes(axes), keepdim).output(0)
    # Of nothing it is NaN; OpenVINO's own mean gives 0.
    return op.divide(op.reduce_sum(x, b.axes(axes), keepdim), count(b, x, axes, b.kind)).output(0)


def count(b: Builder, x: Output, axes: Sequence[int], kind: ov.Type) -> Output:
    """How many elements some dimensions have together."""
    shape = op.gather(op.shape_of(x, "i64"), b.axes(axes), b.scalar(0, ov.Type.i64))
    return b.cast(op.reduce_prod(shape, b.axes([0]), False).output(0), kind)


def _extreme(b: Builder, x: Output, axes: Sequence[int], keep: bool, largest: bool) -> Output:
    """The largest or smallest element, of whole numbers and of infinities too.

    OpenVINO's reductions begin at the lowest finite number, and take whole numbers through float32; its sorting does
    neither. Both pass over NaN, which is put in where there is one.
    """
    mode = "max" if largest else "min"
    made = x
    for axis in axes:
        found = op.topk(made, b.scalar(1, ov.Type.i64), axis, mode, "value", "i64", stable=True)
        made = found.output(0)
    if axes and x.get_element_type().is_real():
        none = op.reduce_logical_or(op.is_nan(x), b.axes(axes), True)
        made = op.select(none, b.scalar(float("nan"), x.get_element_type()), made).output(0)
    return made if keep or not axes else op.squeeze(made, b.axes(axes)).output(0)


def _reduced_bools(b: Builder, x: Output, axes: Sequence[int], keep: bool, largest: bool) -> Output:
    if not axes:
        return x
    both = op.reduce_logical_or if largest else op.reduce_logical_and
    return both(x, b.axes(axes), keep).output(0)


def _amax(largest: bool) -> Any:
    def build(b: Builder, x: Output, dim: Any = None, keepdim: bool = False) -> Output:
        axes = axes_of(b, x, dim)
        if b.kind == ov.Type.boolean:
            return _reduced_bools(b, x, axes, keepdim, largest)
        kind = integers.computed_in(b.kind)
        return b.cast(_extreme(b, b.cast(x, kind), axes, keepdim, largest), b.kind)

    return build


amax = lowers(aten.amax.default)(_amax(True))
amin = lowers(aten.amin.default)(_amax(False))
lowers(aten.max.default)(_amax(True))
lowers(aten.min.default)(_amax(False))


@lowers(aten.aminmax.default)
def aminmax(b: Builder, x: Output, dim: Any = None, keepdim: bool = False) -> list[Output]:
    axes = axes_of(b, x, dim)
    return [_extreme(b, x, axes, keepdim, largest) for largest in (False, True)]


def _any(largest: bool) -> Any:
    def build(b: Builder, x: Output, dim: Any = None, keepdim: bool = False) -> Output:
        made = _reduced_bools(b, b.cast(x, ov.Type.boolean), axes_of(b, x, dim), keepdim, largest)
        return b.cast(made, b.kind)

    return build


any_ = lowers(aten.any.default, aten.any.dim, aten.any.dims)(_any(True))
all_ = lowers(aten.all.default, aten.all.dim, aten.all.dims)(_any(False))


def _floats(call: Call) -> str | None:
    return None if call.result.is_floating_point() else "a product of whole numbers, computed in float32"


@lowers(aten.prod.default, refuses=_floats)
def prod_all(b: Builder, x: Output, dtype: Any = None) -> Output:
    return prod_dim(b, x, None, False, dtype)


@lowers(aten.prod.dim_int, refuses=_floats)
def prod_dim(b: Builder, x: Output, dim: Any, keepdim: bool = False, dtype: Any = None) -> Output:
    axes = axes_of(b, x, dim)
    x = b.cast(x, b.kind)
    return op.reduce_prod(x, b.axes(axes), keepdim).output(0) if axes else x


def moments(b: Builder, x: Output, axes: Sequence[int], correction: Any) -> tuple[Output, Output]:
    """(variance, mean) in float32, dimensions kept."""
    x = b.cast(x, ov.Type.f32)
    number = count(b, x, axes, ov.Type.f32)
    mean = op.divide(op.reduce_sum(x, b.axes(axes), True), number).output(0)
    off = op.subtract(x, mean)
    free = op.maximum(
        op.subtract(number, b.scalar(float(correction), ov.Type.f32)), b.scalar(0.0, ov.Type.f32)
    )
    return op.divide(op.reduce_sum(op.multiply(off, off), b.axes(axes), True), free).output(0), mean


def _finished(b: Builder, value: Output, axes: Sequence[int], keep: bool, kind: ov.Type) -> Output:
    made = value if keep else op.squeeze(value, b.axes(axes)).output(0)
    return b.cast(made, kind)


def _variance(root: bool) -> Any:
    def build(
        b: Builder, x: Output, dim: Any = None, correction: Any = None, keepdim: bool = False
    ) -> Output:
        axes = axes_of(b, x, dim)
        made, _ = moments(b, x, axes, 1 if correction is None else correction)
        if root:
            made = op.sqrt(made).output(0)
        return _finished(b, made, axes, keepdim, b.kind)

    return build


def _variance_by_flag(root: bool) -> Any:
    def build(b: Builder, x: Output, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Output:
        return _variance(root)(b, x, dim, int(unbiased), keepdim)

    return build


def _variance_of_all(root: bool) -> Any:
    def build(b: Builder, x: Output, unbiased: bool = True) -> Output:
        return _variance(root)(b, x, None, int(unbiased), False)

    return build


for _op, _root in ((aten.var, False), (aten.std, True)):
    lowers(_op.correction)(_variance(_root))
    lowers(_op.dim)(_variance_by_flag(_root))
    lowers(_op.default)(_variance_of_all(_root))


def _both(root: bool) -> Any:
    """Variance, or its root, and mean."""

    def build(b: Builder, x: Output, dim: Any, correction: Any, keepdim: bool) -> list[Output]:
        axes = axes_of(b, x, dim)
        spread, mean = moments(b, x, axes, 1 if correction is None else correction)
        kind = dtypes.type_of(b.call.result[0].dtype)
        made = op.sqrt(spread).output(0) if root else spread
        return [_finished(b, one, axes, keepdim, kind) for one in (made, mean)]

    return build


def _register_both(packet: Any, root: bool) -> None:
    build = _both(root)

    @lowers(packet.correction)
    def by_correction(
        b: Builder, x: Output, dim: Any = None, correction: Any = None, keepdim: bool = False
    ) -> Any:
        return build(b, x, dim, correction, keepdim)

    @lowers(packet.dim)
    def by_flag(b: Builder, x: Output, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
        return build(b, x, dim, int(unbiased), keepdim)

    @lowers(packet.default)
    def of_all(b: Builder, x: Output, unbiased: bool = True) -> Any:
        return build(b, x, None, int(unbiased), False)


_register_both(aten.var_mean, False)
_register_both(aten.std_mean, True)


@lowers(aten.cumsum.default)
def cumsum(b: Builder, x: Output, dim: int, dtype: Any = None) -> Output:
    kind = integers.computed_in(b.kind)
    if not len(x.get_partial_shape()):
        return b.cast(x, b.kind)
    summed = op.cum_sum(b.cast(x, kind), b.scalar(dim % len(x.get_partial_shape()), ov.Type.i64))
    return b.cast(summed.output(0), b.kind)


def _known_norm(call: Call) -> str | None:
    order = call.fake("ord" if "ord" in call.given else "p")
    return None if order in (None, 1, 2, "fro") else f"a norm of order {order}"


def _norm(b: Builder, x: Output, order: Any, axes: Sequence[int], keep: bool) -> Output:
    x = b.cast(x, ov.Type.f32)
    if order == 1:
        made = op.reduce_sum(op.abs(x), b.axes(axes), keep) if axes else op.abs(x)
    else:
        made = op.sqrt(op.reduce_sum(op.multiply(x, x), b.axes(axes), keep)) if axes else op.abs(x)
    return b.cast(made.output(0), b.kind)


@lowers(aten.linalg_vector_norm.default, refuses=_known_norm)
def vector_norm(
    b: Builder, x: Output, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Output:
    return _norm(b, x, ord, axes_of(b, x, dim), keepdim)


@lowers(aten.norm.ScalarOpt_dim, aten.norm.Scalar, refuses=_known_norm)
def norm(b: Builder, x: Output, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Output:
    return _norm(b, x, p, axes_of(b, x, dim), keepdim)


@lowers(aten.logsumexp.default)
def logsumexp(b: Builder, x: Output, dim: Any, keepdim: bool = False) -> Output:
    axes = axes_of(b, x, dim)
    x = b.cast(x, ov.Type.f32)
    if not axes:
        return b.cast(x, b.kind)
    high = _extreme(b, x, axes, True, True)
    zero = b.scalar(0.0, ov.Type.f32)
    infinite = op.equal(op.abs(high), b.scalar(float("inf"), ov.Type.f32))
    base = op.select(infinite, zero, high)
    made = op.add(op.log(op.reduce_sum(op.exp(op.subtract(x, base)), b.axes(axes), True)), base)
    made = op.select(op.is_nan(high), high, made)  # OpenVINO's exp gives a number for what is none
    return _finished(b, made.output(0), axes, keepdim, b.kind)
