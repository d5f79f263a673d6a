"""Tensors made of nothing but sizes and numbers."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.places import inside
from dlinfer.vendor.openvino.registry import Call, lowers

aten = torch.ops.aten
I64, F32 = ov.Type.i64, ov.Type.f32


def filled(b: Builder, sizes: list[Any], value: Any) -> Output:
    """A tensor of the result's type with one number everywhere."""
    return op.broadcast(b.cast(value, b.kind), b.numbers(sizes)).output(0)


def filled_like(b: Builder, x: Output, value: Any) -> Output:
    return op.broadcast(b.cast(value, b.kind), op.shape_of(x, "i64")).output(0)


@lowers(aten.full.default)
def full(b: Builder, size: list[Any], value: Any, *_: Any) -> Output:
    return filled(b, size, value)


@lowers(aten.zeros.default, aten.empty.memory_format)
def zeros(b: Builder, size: list[Any], *_: Any) -> Output:
    """What ``empty`` holds is nobody's to read before it is written, so zeros will do."""
    return filled(b, size, 0)


@lowers(aten.ones.default)
def ones(b: Builder, size: list[Any], *_: Any) -> Output:
    return filled(b, size, 1)


@lowers(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(b: Builder, x: Output, size: list[Any], *_: Any) -> Output:
    return filled(b, size, 0)


@lowers(aten.new_ones.default)
def new_ones(b: Builder, x: Output, size: list[Any], *_: Any) -> Output:
    return filled(b, size, 1)


@lowers(aten.new_full.default)
def new_full(b: Builder, x: Output, size: list[Any], value: Any, *_: Any) -> Output:
    return filled(b, size, value)


@lowers(aten.zeros_like.default, aten.empty_like.default, aten.zero.default)
def zeros_like(b: Builder, x: Output, *_: Any) -> Output:
    return filled_like(b, x, 0)


@lowers(aten.ones_like.default)
def ones_like(b: Builder, x: Output, *_: Any) -> Output:
    return filled_like(b, x, 1)


@lowers(aten.full_like.default, aten.fill.Scalar, aten.fill.Tensor)
def full_like(b: Builder, x: Output, value: Any, *_: Any) -> Output:
    return filled_like(b, x, value)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(b: Builder, value: Any, *_: Any) -> Output:
    return b.cast(value, b.kind)


def _whole_step(call: Call) -> str | None:
    """A range of floats counts its elements from its ends; OpenVINO's rounding of that is its own."""
    for name in ("start", "end", "step"):
        value = call.fake(name) if name in call.given else 0
        if isinstance(value, (float, torch.SymFloat)) and not (
            isinstance(value, float) and value.is_integer()
        ):
            return f"a range with the {name} {value}"
    return None


@lowers(aten.arange.default, refuses=_whole_step)
def arange(b: Builder, end: Any, *_: Any) -> Output:
    return iota(b, 0, end, 1)


@lowers(aten.arange.start, refuses=_whole_step)
def arange_start(b: Builder, start: Any, end: Any, *_: Any) -> Output:
    return iota(b, start, end, 1)


@lowers(aten.arange.start_step, refuses=_whole_step)
def arange_step(b: Builder, start: Any, end: Any, step: Any = 1, *_: Any) -> Output:
    return iota(b, start, end, step)


def iota(b: Builder, start: Any, end: Any, step: Any) -> Output:
    """Whole numbers from start to before end, as the result's type."""
    first, last, by = (
        b.cast(value if isinstance(value, Output) else int(value), I64) for value in (start, end, step)
    )
    return b.cast(op.range(first, last, by, "i64").output(0), b.kind)


def _few(call: Call) -> str | None:
    steps = call.fake("steps")
    return None if isinstance(steps, int) and steps > 0 else "a number of steps that is not known"


@lowers(aten.linspace.default, refuses=_few)
def linspace(b: Builder, start: Any, end: Any, steps: int, *_: Any) -> Output:
    """As torch: from the near end, so that both ends are exact."""
    if steps == 1:
        return filled(b, [1], start)
    kind = F32
    first, last = b.cast(start, kind), b.cast(end, kind)
    by = op.divide(op.subtract(last, first), b.scalar(float(steps - 1), kind))
    places = torch.arange(steps, dtype=torch.float32)
    near = op.add(first, op.multiply(by, b.constant(places)))
    far = op.subtract(last, op.multiply(by, b.constant(steps - 1 - places)))
    made = op.select(b.constant(places < steps // 2), near, far).output(0)
    return b.cast(made, b.kind)


@lowers(aten.eye.default)
def eye(b: Builder, size: Any, *_: Any) -> Output:
    return eye_m(b, size, size)


@lowers(aten.eye.m)
def eye_m(b: Builder, rows: Any, columns: Any, *_: Any) -> Output:
    sizes = [b.cast(one, I64) for one in (rows, columns)]
    return b.cast(op.eye(*sizes, b.scalar(0, I64), "f32").output(0), b.kind)


def _known_classes(call: Call) -> str | None:
    return "a number of classes that only the data tells" if call.fake("num_classes") == -1 else None


@lowers(aten.one_hot.default, refuses=_known_classes)
def one_hot(b: Builder, x: Output, num_classes: Any) -> Output:
    depth = b.cast(num_classes, I64)
    x = inside(b, x, num_classes, b.call.fake("num_classes"), negative=False)
    return op.one_hot(x, depth, b.scalar(1, b.kind), b.scalar(0, b.kind), -1).output(0)
