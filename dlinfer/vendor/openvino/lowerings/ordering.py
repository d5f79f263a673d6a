"""Sorting and choosing by size. Of equal elements the first comes first, as in torch's stable sorts."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder, Size
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import Call, lowers

aten = torch.ops.aten
I64, F32 = ov.Type.i64, ov.Type.f32


def _ordered(b: Builder, x: Output, number: Size, dim: int, largest: bool) -> tuple[Output, Output]:
    """(values, indices) of the first ``number`` elements along a dimension. NaN is larger than all numbers."""
    kind = x.get_element_type()
    if kind.is_real():
        return _ordered_floats(b, x, number, dim % rank(x), largest)
    wide = ov.Type.i32 if kind == ov.Type.boolean else integers.computed_in(kind)
    sorted_ = op.topk(
        b.cast(x, wide),
        b.cast(number, I64),
        dim % rank(x),
        "max" if largest else "min",
        "value",
        "i64",
        stable=True,
    )
    return b.cast(sorted_.output(0), kind), sorted_.output(1)


def _ordered_floats(b: Builder, x: Output, number: Size, axis: int, largest: bool) -> tuple[Output, Output]:
    """Sorted with infinity in NaN's place, which OpenVINO leaves anywhere, and the largest float32 in infinity's."""
    wide = b.cast(x, F32)
    below = op.minimum(wide, b.scalar(torch.finfo(torch.float32).max, F32))
    key = op.select(op.is_nan(wide), b.scalar(float("inf"), F32), below)
    mode = "max" if largest else "min"
    place = op.topk(key, b.cast(number, I64), axis, mode, "value", "i64", stable=True).output(1)
    return op.gather_elements(x, place, axis).output(0), place


def _has_dims(call: Call) -> str | None:
    return None if call.fake("self").dim() else "a tensor of no dimensions"


@lowers(aten.topk.default, refuses=_has_dims)
def topk(
    b: Builder, x: Output, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True
) -> list[Output]:
    return list(_ordered(b, x, k, dim, largest))


@lowers(aten.sort.default, refuses=_has_dims)
def sort(b: Builder, x: Output, dim: int = -1, descending: bool = False) -> list[Output]:
    return list(_ordered(b, x, b.size(x, dim), dim, descending))


@lowers(aten.sort.stable, refuses=_has_dims)
def sort_stable(b: Builder, x: Output, stable: Any, dim: int = -1, descending: bool = False) -> list[Output]:
    return sort(b, x, dim, descending)


@lowers(aten.argsort.default, refuses=_has_dims)
def argsort(b: Builder, x: Output, dim: int = -1, descending: bool = False) -> Output:
    return sort(b, x, dim, descending)[1]


@lowers(aten.argsort.stable, refuses=_has_dims)
def argsort_stable(b: Builder, x: Output, stable: bool, dim: int = -1, descending: bool = False) -> Output:
    return sort(b, x, dim, descending)[1]


def _best(largest: bool) -> Any:
    def build(b: Builder, x: Output, dim: int, keepdim: bool = False) -> list[Output]:
        if rank(x) == 0:
            return [x, b.scalar(0, I64)]
        axis = b.axes([dim % rank(x)])
        found = _first_of_floats(b, x, dim, largest) if x.get_element_type().is_real() else None
        found = found or _ordered(b, x, 1, dim, largest)
        return [one if keepdim else op.squeeze(one, axis).output(0) for one in found]

    return build


def _first_of_floats(b: Builder, x: Output, dim: int, largest: bool) -> tuple[Output, Output]:
    """(value, index) of the largest or smallest along a dimension, or of the first NaN."""
    one, axis, mode = b.scalar(1, I64), dim % rank(x), "max" if largest else "min"
    found = op.topk(x, one, axis, mode, "value", "i64", stable=True)
    none = op.is_nan(x)
    first = op.topk(b.cast(none.output(0), ov.Type.i32), one, axis, "max", "value", "i64", stable=True)
    there = op.reduce_logical_or(none, b.axes([axis]), True)
    nan = b.scalar(float("nan"), x.get_element_type())
    value = op.select(there, nan, found.output(0)).output(0)
    return value, op.select(there, first.output(1), found.output(1)).output(0)


max_dim = lowers(aten.max.dim)(_best(True))
min_dim = lowers(aten.min.dim)(_best(False))


def _place(largest: bool) -> Any:
    def build(b: Builder, x: Output, dim: int | None = None, keepdim: bool = False) -> Output:
        if rank(x) == 0:
            return b.scalar(0, I64)
        if dim is not None:
            return _best(largest)(b, x, dim, keepdim)[1]
        flat = op.reshape(x, b.axes([-1]), False).output(0)
        place = _best(largest)(b, flat, 0)[1]
        return op.reshape(place, b.axes([1] * rank(x)), False).output(0) if keepdim else place

    return build


argmax = lowers(aten.argmax.default)(_place(True))
argmin = lowers(aten.argmin.default)(_place(False))
