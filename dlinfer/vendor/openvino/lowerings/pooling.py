"""Pooling over windows."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.convolution import spread
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import Call, lowers

aten = torch.ops.aten
F32 = ov.Type.f32


def _batched(dims: int) -> Any:
    def check(call: Call) -> str | None:
        x = call.fake("self")
        if x.dim() != dims + 2:
            return "an image without a batch"
        return None if x.is_floating_point() else "pooling of whole numbers"

    return check


def _max_pool(dims: int) -> Any:
    def build(
        b: Builder,
        x: Output,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil: bool = False,
    ) -> Output:
        sizes = spread(kernel, dims)
        strides = spread(stride, dims) if stride else sizes
        pads = spread(padding, dims)
        # torch drops a window that begins in the padding behind the image.
        rounding = "ceil_torch" if ceil else "floor"

        def pooled(values: Any) -> Output:
            made = op.max_pool(values, strides, spread(dilation, dims), pads, pads, sizes, rounding)
            return made.output(0)

        return _of_all_floats(b, x, pooled)

    return build


def _of_all_floats(b: Builder, x: Output, pooled: Any) -> Output:
    """The largest of windows. OpenVINO begins at the lowest finite number and passes over NaN, so what a window holds
    is pooled too: 0 for nothing but negative infinity, 2 for NaN."""
    kind = x.get_element_type()
    zero, one, two = (b.scalar(value, F32) for value in (0.0, 1.0, 2.0))
    finite = op.less(b.scalar(float("-inf"), F32), b.cast(x, F32))
    held = pooled(op.select(op.is_nan(x), two, op.select(finite, one, zero)))
    made = op.select(op.equal(held, zero), b.scalar(float("-inf"), kind), pooled(x))
    return op.select(op.equal(held, two), b.scalar(float("nan"), kind), made).output(0)


def _average_pool(dims: int) -> Any:
    def build(
        b: Builder,
        x: Output,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil: bool = False,
        count_include_pad: bool = True,
        divisor: Any = None,
    ) -> Output:
        sizes = spread(kernel, dims)
        strides = spread(stride, dims) if stride else sizes
        pads = spread(padding, dims)
        rounding = "ceil_torch" if ceil else "floor"
        # Without dilations the CPU plugin crashes.
        given = {"kernel_shape": sizes, "rounding_type": rounding, "dilations": [1] * dims}
        counted = ceil and count_include_pad
        made = op.avg_pool(x, strides, pads, pads, exclude_pad=counted or not count_include_pad, **given)
        if not counted or not any(pads):
            return made.output(0)
        # torch counts the padding, but not what a last window covers beyond it. OpenVINO counts both or none: so the
        # padding is part of the image, and windows that begin in it are cut off.
        edge = b.axes([0, 0, *pads])
        padded = op.pad(x, edge, edge, "constant", b.cast(0.0, x.get_element_type()))
        whole = op.avg_pool(padded, strides, [0] * dims, [0] * dims, exclude_pad=True, **given)
        axes = list(range(2, 2 + dims))
        ends = op.gather(op.shape_of(made, "i64"), b.axes(axes), b.scalar(0, ov.Type.i64))
        return op.slice(whole, b.axes([0] * dims), ends, b.axes([1] * dims), b.axes(axes)).output(0)

    return build


def _own_divisor(dims: int) -> Any:
    def check(call: Call) -> str | None:
        if call.given.get("divisor_override") is not None:
            return "a divisor of its own"
        return _batched(dims)(call)

    return check


for _dims, _maximum, _average in (
    (1, aten.max_pool1d.default, aten.avg_pool1d.default),
    (2, aten.max_pool2d.default, aten.avg_pool2d.default),
    (3, aten.max_pool3d.default, aten.avg_pool3d.default),
):
    lowers(_maximum, refuses=_batched(_dims))(_max_pool(_dims))
    lowers(_average, refuses=_own_divisor(_dims))(_average_pool(_dims))


def _known_output(dims: int) -> Any:
    def check(call: Call) -> str | None:
        if not all(isinstance(size, int) for size in call.fake("output_size")):
            return "an output of a size that varies"
        return _batched(dims)(call)

    return check


@lowers(aten.adaptive_avg_pool1d.default, refuses=_known_output(1))
def adaptive_avg_pool1d(b: Builder, x: Output, size: list[int]) -> Output:
    return _adaptive(b, x, size)


@lowers(aten.adaptive_avg_pool2d.default, refuses=_known_output(2))
def adaptive_avg_pool2d(b: Builder, x: Output, size: list[int]) -> Output:
    return _adaptive(b, x, size)


def _adaptive(b: Builder, x: Output, size: list[int]) -> Output:
    if all(one == 1 for one in size):
        return op.reduce_mean(x, b.axes(list(range(2, rank(x)))), True).output(0)
    return op.adaptive_avg_pool(x, b.axes(size)).output(0)
