"""Sorting and selecting by size. Equal elements keep their order, as in torch's stable sorts."""

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder, Size
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import Build, lowers, unless

aten = torch.ops.aten
I64, F32 = ov.Type.i64, ov.Type.f32


def sorted_first(b: Builder, x: Output, number: Size, axis: int, largest: bool) -> list[Output]:
    """Return two tensors: values and indices of the first ``number`` elements along an axis.

    The place of NaN in this order is undefined.
    """
    mode = "max" if largest else "min"
    return list(op.topk(x, b.cast(number, I64), axis, mode, "value", "i64", stable=True).outputs())


def _ordered(b: Builder, x: Output, number: Size, dim: int, largest: bool) -> list[Output]:
    """Return two tensors: values and indices of the first ``number`` elements along ``dim``. NaN is the largest."""
    kind, axis = x.get_element_type(), dim % rank(x)
    if not kind.is_real():
        wide = ov.Type.i32 if kind == ov.Type.boolean else integers.computed_in(kind)
        values, place = sorted_first(b, b.cast(x, wide), number, axis, largest)
        return [b.cast(values, kind), place]
    # OpenVINO sorts NaN to any place. So the keys are quarters, with infinity for NaN, and for infinity a power of two,
    # which bfloat16 can represent too.
    wide = b.cast(x, F32)
    below = op.minimum(op.multiply(wide, b.scalar(0.25, F32)), b.scalar(2.0**127, F32))
    key = op.select(op.is_nan(wide), b.scalar(float("inf"), F32), below).output(0)
    _, place = sorted_first(b, key, number, axis, largest)
    return [op.gather_elements(x, place, axis).output(0), place]


_has_dims = unless(lambda call: call.fake("self").dim(), "the tensor has no dimensions")


@lowers(aten.topk.default, refuses=_has_dims)
def topk(b: Builder, x: Output, k: Size, *, dim: int = -1, largest: bool = True) -> list[Output]:
    return _ordered(b, x, k, dim, largest)


@lowers(aten.sort.default, aten.sort.stable, refuses=_has_dims)
def sort(b: Builder, x: Output, *, dim: int = -1, descending: bool = False) -> list[Output]:
    return _ordered(b, x, b.size(x, dim), dim, descending)


@lowers(aten.argsort.default, aten.argsort.stable, refuses=_has_dims)
def argsort(b: Builder, x: Output, *, dim: int = -1, descending: bool = False) -> Output:
    return sort(b, x, dim=dim, descending=descending)[1]


def _best(largest: bool) -> Build:
    def build(b: Builder, x: Output, dim: int, keepdim: bool = False) -> list[Output]:
        if rank(x) == 0:
            return [x, b.scalar(0, I64)]
        axis = dim % rank(x)
        real = x.get_element_type().is_real()
        best = _first_of_floats(b, x, axis, largest) if real else _ordered(b, x, 1, axis, largest)
        return best if keepdim else [op.squeeze(tensor, b.axes([axis])).output(0) for tensor in best]

    return build


def _first_of_floats(b: Builder, x: Output, axis: int, largest: bool) -> list[Output]:
    """Return two tensors: value and index of the largest or smallest element along an axis, or of the first NaN."""
    value, place = sorted_first(b, x, 1, axis, largest)
    none = op.is_nan(x).output(0)
    _, first = sorted_first(b, b.cast(none, ov.Type.i32), 1, axis, True)
    there = op.reduce_logical_or(none, b.axes([axis]), True)
    nan = b.scalar(float("nan"), x.get_element_type())
    return [op.select(there, nan, value).output(0), op.select(there, first, place).output(0)]


lowers(aten.max.dim)(_best(True))
lowers(aten.min.dim)(_best(False))


def _place(largest: bool) -> Build:
    def build(b: Builder, x: Output, dim: int | None = None, keepdim: bool = False) -> Output:
        if rank(x) == 0:
            return b.scalar(0, I64)
        if dim is not None:
            return _best(largest)(b, x, dim, keepdim)[1]
        flat = op.reshape(x, b.axes([-1]), False).output(0)
        place = _best(largest)(b, flat, 0)[1]
        return op.reshape(place, b.axes([1] * rank(x)), False).output(0) if keepdim else place

    return build


lowers(aten.argmax.default)(_place(True))
lowers(aten.argmin.default)(_place(False))
