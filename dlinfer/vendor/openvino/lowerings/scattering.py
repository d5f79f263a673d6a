"""Writing by index, without mutation: return the whole tensor with some elements replaced.

If only rows of an input are written, the new rows and the old content stay separate (``written.Rows``), so that a KV
cache is not copied.
"""

import math
from collections.abc import Sequence
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder, Size
from dlinfer.vendor.openvino.dtypes import SHORT
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.lowerings.creation import iota
from dlinfer.vendor.openvino.lowerings.gathering import index_parts, no_masks
from dlinfer.vendor.openvino.lowerings.places import inside_dim
from dlinfer.vendor.openvino.lowerings.shapes import leading, rank
from dlinfer.vendor.openvino.lowerings.slicing import FURTHEST, cut
from dlinfer.vendor.openvino.registry import Build, Call, lowers, unless
from dlinfer.vendor.openvino.workarounds.precision import kept_wide
from dlinfer.vendor.openvino.written import Rows

aten = torch.ops.aten
F32, I64 = ov.Type.f32, ov.Type.i64


def _rows(b: Builder, x: Output, dim: int, index: Output, value: Output) -> Output:
    """Broadcast ``value`` to rows of x along ``dim``, as many as ``index`` has elements."""
    sizes = [b.size(x, axis) for axis in range(rank(x))]
    sizes[dim] = b.size(index, 0)
    return op.broadcast(value, b.numbers(sizes)).output(0)


def _placed(
    b: Builder, x: Output, dim: int, index: Output, source: Output, number: Any, unique: bool = False
) -> Output | Rows:
    """Replace rows of x at ``index`` along ``dim``. Returns Rows if x is an input of the model, else the whole tensor.

    number: how many rows, as a size of a fake tensor. unique: whether no place repeats."""
    sizes = list(b.call.fake("self").shape)
    sizes[dim] = number
    rows = Rows(x, dim, b.cast(index, I64), source, tuple(sizes), unique)
    return rows if x.get_node().get_type_name() == "Parameter" else rows.put()


@lowers(aten.index_copy.default)
def index_copy(b: Builder, x: Output, dim: int, index: Output, source: Output) -> Output | Rows:
    if rank(x) == 0:
        return op.reshape(source, b.axes([]), False).output(0)
    place = dim % rank(x)
    rows = inside_dim(b, x, place, index, negative=False)
    flat = op.reshape(rows, b.axes([-1]), False).output(0) if rank(rows) != 1 else rows
    return _placed(b, x, place, flat, source, b.call.fake("index").numel())


_whole_step = unless(lambda call: isinstance(call.fake("step"), int), "the step is not fixed")


@lowers(aten.slice_scatter.default, refuses=_whole_step)
def slice_scatter(
    b: Builder, x: Output, source: Output, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Output | Rows:
    place = dim % rank(x)
    size = b.size(x, place)
    first = _clamped(b, 0 if start is None else start, size)
    if first == 0 and step == 1 and (end is None or (isinstance(end, int) and end >= FURTHEST)):
        return source
    # The source's number of rows decides the end.
    number = b.cast(b.size(source, place), I64)
    begin = b.cast(first, I64)
    behind = op.add(begin, op.multiply(number, b.scalar(step, I64))).output(0)
    index = iota(b, behind, begin, step)
    return _placed(b, x, place, index, source, b.call.fake("src").shape[place], unique=True)


def _clamped(b: Builder, start: Any, size: Size) -> Any:
    """Return a slice's start, counted from the beginning and limited to 0..size."""
    if isinstance(start, int) and start >= 0:
        if isinstance(size, int):
            return min(start, size)
        return 0 if start == 0 else op.minimum(b.scalar(start, I64), size).output(0)
    if isinstance(start, int) and isinstance(size, int):
        return max(start + size, 0)
    position, whole = b.cast(start, I64), b.cast(size, I64)
    counted = op.select(op.less(position, b.scalar(0, I64)), op.add(position, whole), position)
    return op.minimum(op.maximum(counted, b.scalar(0, I64)), whole).output(0)


@lowers(aten.select_scatter.default)
def select_scatter(b: Builder, x: Output, source: Output, dim: int, index: Any) -> Output | Rows:
    place = dim % rank(x)
    row = op.unsqueeze(source, b.axes([place])).output(0)
    return _placed(b, x, place, b.single(_clamped(b, index, b.size(x, place))), row, 1, unique=True)


@lowers(aten.index_put.default, refuses=no_masks)
def index_put(
    b: Builder, x: Output, indices: Sequence[Output | None], values: Output, accumulate: bool = False
) -> Output | Rows:
    indexed = [(dim, tensor) for dim, tensor in enumerate(indices) if tensor is not None]
    dims = [dim for dim, _ in indexed]
    values = b.cast(values, x.get_element_type())
    if len(indexed) == 1 and rank(indexed[0][1]) == 1 and not accumulate:
        dim, index = indexed[0]
        number = b.call.fake("indices")[dim].shape[0]
        place = inside_dim(b, x, dim, index, negative=True)
        return _placed(b, x, dim, place, _rows(b, x, dim, index, values), number)
    order, flat, places, spread = index_parts(b, x, indexed)
    rest = [b.size(x, dim) for dim in order[len(dims) :]]
    target = op.shape_of(places, "i64")
    if rest:
        target = op.concat([target, b.numbers(rest)], 0)
    neighbours = dims == list(range(dims[0], dims[0] + len(dims))) and dims[0] > 0
    if neighbours:  # in ``flat`` the indexed dimensions come first
        values = _picked_first(b, values, dims[0], spread, len(rest))
    filled = op.broadcast(values, target).output(0)
    index = op.unsqueeze(places, b.axes([-1]))
    written = _added(b, flat, index, filled) if accumulate else op.scatter_nd_update(flat, index, filled)
    moved = op.gather(op.shape_of(x, "i64"), b.axes(order), b.scalar(0, I64))
    whole = op.reshape(written, moved, False)
    back = sorted(range(len(order)), key=order.__getitem__)
    return op.transpose(whole, b.axes(back)).output(0)


def _added(b: Builder, x: Output, index: Any, source: Output) -> Output:
    kind, wide = x.get_element_type(), _summed_in(x.get_element_type())
    x, source = b.cast(x, wide), b.cast(source, wide)
    return b.cast(kept_wide(op.scatter_nd_update(x, index, source, "sum")).output(0), kind)


def _picked_first(b: Builder, values: Output, before: int, spread: int, rest: int) -> Output:
    values = leading(b, values, spread + rest)
    order = [*range(before, before + spread), *range(before), *range(before + spread, spread + rest)]
    return op.transpose(values, b.axes(order)).output(0)


_REDUCTIONS = {"add": "sum", "multiply": "prod", "amax": "max", "amin": "min"}
"""torch's name of a reduction -> OpenVINO's name, where the two differ."""


def _same_rank(call: Call) -> str | None:
    if call.fake("self").dtype is torch.bool and call.arguments.get("reduce"):
        return "it reduces bools"
    return None if call.fake("self").dim() else "the tensor has no dimensions"


def _reduced(call: Call) -> str | None:
    """Return a reason to refuse a scatter with a reduction; else None.

    A maximum or minimum of floats with include_self=False is refused, because the plugin starts from a finite number
    and loses infinity."""
    arguments = call.arguments
    alone = not arguments.get("include_self", True) and arguments["reduce"] in ("amax", "amin")
    if alone and call.fake("self").is_floating_point():
        return "it takes an extreme of scattered floats without self"
    return _same_rank(call)


def _within(b: Builder, source: Output, index: Output) -> Output:
    for axis in range(rank(index)):
        mine, other = b.call.fake("src").shape[axis], b.call.fake("index").shape[axis]
        if str(mine) != str(other):
            source = cut(b, source, axis, 0, b.size(index, axis))
    return source


def _scatter(
    b: Builder, x: Output, dim: int, index: Output, source: Output, how: str, keep: bool = True
) -> Output:
    kind, axis = x.get_element_type(), b.scalar(dim % rank(x), I64)
    index = inside_dim(b, x, dim % rank(x), index, negative=False)
    wide = _summed_in(kind) if how in ("sum", "prod", "mean") else kind
    x, source = b.cast(x, wide), b.cast(source, wide)
    result = kept_wide(op.scatter_elements_update(x, index, source, axis, how, keep))
    return b.cast(result.output(0), kind)


def _summed_in(kind: ov.Type) -> ov.Type:
    """Return the type to sum in: float32 for 16-bit floats, because the plugin would round after each summand."""
    return F32 if kind in SHORT else integers.computed_in(kind)


@lowers(aten.scatter.value, refuses=_same_rank)
def scatter_value(b: Builder, x: Output, dim: int, index: Output, value: Any) -> Output:
    source = op.broadcast(b.cast(value, b.kind), op.shape_of(index, "i64")).output(0)
    return _scatter(b, x, dim, index, source, "none")


def _scatters(how: str) -> Build:
    return lambda b, x, dim, index, src: _scatter(b, x, dim, index, _within(b, src, index), how)


lowers(aten.scatter.src, refuses=_same_rank)(_scatters("none"))
lowers(aten.scatter_add.default, refuses=_same_rank)(_scatters("sum"))


@lowers(aten.scatter_reduce.two, aten.scatter.reduce, refuses=_reduced)
def scatter_reduce(
    b: Builder, x: Output, dim: int, index: Output, src: Output, reduce: str, include_self: bool = True
) -> Output:
    src = _within(b, src, index)
    result = _scatter(b, x, dim, index, src, _REDUCTIONS.get(reduce, reduce), include_self)
    if reduce not in ("amax", "amin") or not b.kind.is_real():
        return result
    # The plugin skips NaN. So a second scatter takes the largest of 1 for NaN and 0 for numbers.
    of_x, of_src = (b.cast(op.is_nan(b.cast(tensor, F32)).output(0), F32) for tensor in (x, src))
    nans = _scatter(b, of_x, dim, index, of_src, "max", include_self)
    return b.select(b.cast(nans, ov.Type.boolean), math.nan, result, b.kind)


@lowers(aten.index_add.default, refuses=_same_rank)
def index_add(b: Builder, x: Output, dim: int, index: Output, source: Output, alpha: Any = 1) -> Output:
    place = dim % rank(x)
    if isinstance(alpha, Output) or alpha != 1:
        source = op.multiply(source, b.cast(alpha, b.kind)).output(0)
    order = [place, *(axis for axis in range(rank(x)) if axis != place)]
    first, rows = (op.transpose(tensor, b.axes(order)).output(0) for tensor in (x, source))
    places = op.reshape(inside_dim(b, x, place, index, negative=False), b.axes([-1, 1]), False)
    summed = _added(b, first, places, rows)
    return op.transpose(summed, b.axes(sorted(range(rank(x)), key=order.__getitem__))).output(0)


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(b: Builder, x: Output, dim: int, index: Output, value: Any) -> Output:
    place = dim % rank(x)
    index = inside_dim(b, x, place, index, negative=True)
    source = _rows(b, x, place, index, b.cast(value, b.kind))
    return op.scatter_update(x, index, source, b.scalar(place, I64)).output(0)
