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
I64 = ov.Type.i64


def _ordered(b: Builder, x: Output, number: Size, dim: int, largest: bool) -> tuple[Output, Output]:
    """(values, indices) of the first ``number`` elements along a dimension."""
    kind = x.get_element_type()
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
        found = _ordered(b, x, 1, dim, largest)
        axis = b.axes([dim % rank(x)])
        return [one if keepdim else op.squeeze(one, axis).output(0) for one in found]

    return build


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
