"""Tensors created from sizes and numbers only."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.places import inside
from dlinfer.vendor.openvino.registry import Build, Call, defaults, lowers, unless

aten = torch.ops.aten
I64, F32 = ov.Type.i64, ov.Type.f32


@lowers(*defaults("full new_full full_like"), aten.fill.Scalar, aten.fill.Tensor)
def filled(
    b: Builder, *, self: Output | None = None, size: Any = None, fill_value: Any = None, value: Any = None
) -> Output:
    """Fill a tensor with a number. Its size is ``size`` or, if that is None, the size of ``self``.

    fill_value, value: the number. Each op has one of these two parameters; the other is None.
    """
    sizes = b.numbers(size) if size is not None else op.shape_of(self, "i64")
    return b.full(value if fill_value is None else fill_value, sizes)


def _filled_with(number: int) -> Build:
    return lambda b, *, self=None, size=None: filled(b, self=self, size=size, value=number)


# ``empty`` too, whose content is undefined.
_ZEROS = (*defaults("zeros new_zeros zeros_like zero new_empty empty_like"), aten.empty.memory_format)
lowers(*_ZEROS)(_filled_with(0))
lowers(*defaults("ones new_ones ones_like"))(_filled_with(1))
lowers(aten.scalar_tensor.default)(lambda b, value, *_: b.cast(value, b.kind))


def _whole_step(call: Call) -> str | None:
    """Return a reason to refuse a range with a fractional start, end or step; else None.

    OpenVINO rounds the number of its elements differently.
    """
    for name in ("start", "end", "step"):
        value = call.fake(name) if name in call.arguments else 0
        whole = isinstance(value, float) and value.is_integer()
        if isinstance(value, (float, torch.SymFloat)) and not whole:
            return f"the range has the {name} {value}"
    return None


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step, refuses=_whole_step)
def arange(b: Builder, *, end: Any, start: Any = 0, step: Any = 1) -> Output:
    bounds = (value if isinstance(value, Output) else int(value) for value in (end, start, step))
    return b.cast(iota(b, *bounds), b.kind)


def iota(b: Builder, end: Any, start: Any = 0, step: Any = 1) -> Output:
    """Return the integers from ``start`` to before ``end``, in steps of ``step``, as i64."""
    first, last, by = (b.cast(value, I64) for value in (start, end, step))
    return op.range(first, last, by, "i64").output(0)


_few = unless(
    lambda call: isinstance(call.fake("steps"), int) and call.fake("steps") > 0,
    "the number of steps is not known",
)


@lowers(aten.linspace.default, refuses=_few)
def linspace(b: Builder, start: Any, end: Any, steps: int, *_: Any) -> Output:
    """Compute each element from the nearer end, as torch does, so that both ends are exact."""
    if steps == 1:
        return filled(b, size=[1], value=start)
    first, last = b.cast(start, F32), b.cast(end, F32)
    by = op.divide(op.subtract(last, first), b.scalar(float(steps - 1), F32))
    places = torch.arange(steps, dtype=torch.float32)
    near = op.add(first, op.multiply(by, b.constant(places)))
    far = op.subtract(last, op.multiply(by, b.constant(steps - 1 - places)))
    result = op.select(b.constant(places < steps // 2), near, far).output(0)
    return b.cast(result, b.kind)


@lowers(aten.eye.default, aten.eye.m)
def eye(b: Builder, *, n: Any, m: Any = None) -> Output:
    sizes = [b.cast(number, I64) for number in (n, n if m is None else m)]
    return b.cast(op.eye(*sizes, b.scalar(0, I64), "f32").output(0), b.kind)


_known_classes = unless(
    lambda call: call.fake("num_classes") != -1, "the number of classes depends on the data"
)


@lowers(aten.one_hot.default, refuses=_known_classes)
def one_hot(b: Builder, x: Output, num_classes: Any) -> Output:
    depth = b.cast(num_classes, I64)
    x = inside(b, x, num_classes, b.call.fake("num_classes"), negative=False)
    return op.one_hot(x, depth, b.scalar(1, b.kind), b.scalar(0, b.kind), -1).output(0)
