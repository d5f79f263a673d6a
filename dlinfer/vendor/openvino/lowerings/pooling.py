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


def _taken(call: Call) -> str | None:
    """Return a reason to refuse an image without a batch dimension, or of integers; else None.

    The digit in the op's name is the number of the image's dimensions."""
    x = call.fake("self")
    if x.dim() != int(call.target._schema.name[-2]) + 2:
        return "the image has no batch dimension"
    return None if x.is_floating_point() else "the pooling is over integers"


def _windows(x: Output, kernel: Any, stride: Any, padding: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the windows' sizes, strides and padding: three lists, with a number for each dimension of the image."""
    dims = rank(x) - 2
    sizes = spread(kernel, dims)
    return sizes, spread(stride, dims) if stride else sizes, spread(padding, dims)


def _rounding(ceil: bool) -> str:
    """Return OpenVINO's rounding type.

    Like torch, "ceil_torch" drops windows that start in the padding at the end.
    """
    return "ceil_torch" if ceil else "floor"


@lowers(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default, refuses=_taken)
def max_pool(
    b: Builder, x: Output, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> Output:
    sizes, strides, pads = _windows(x, kernel, stride, padding)
    dilations = spread(dilation, rank(x) - 2)

    def pooled(values: Any) -> Output:
        return op.max_pool(values, strides, dilations, pads, pads, sizes, _rounding(ceil)).output(0)

    return _of_all_floats(b, x, pooled)


def _of_all_floats(b: Builder, x: Output, pooled: Any) -> Output:
    """Return the largest element of each window, also negative infinity and NaN. pooled: the plugin's own pooling.

    The plugin starts from the lowest finite number and skips NaN. So a second pooling, of codes, finds the windows with
    NaN (code 2) and the windows of negative infinity only (code 0)."""
    kind = x.get_element_type()
    zero, unit, two = (b.scalar(value, F32) for value in (0.0, 1.0, 2.0))
    finite = op.less(b.scalar(float("-inf"), F32), b.cast(x, F32))
    held = pooled(op.select(op.is_nan(x), two, op.select(finite, unit, zero)))
    result = op.select(op.equal(held, zero), b.scalar(float("-inf"), kind), pooled(x))
    return op.select(op.equal(held, two), b.scalar(float("nan"), kind), result).output(0)


def _own_divisor(call: Call) -> str | None:
    return "it has a divisor_override" if call.arguments.get("divisor_override") is not None else _taken(call)


@lowers(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default, refuses=_own_divisor)
def avg_pool(
    b: Builder, x: Output, kernel: Any, stride: Any, padding: Any, ceil: bool, padded: bool, *_: Any
) -> Output:
    dims = rank(x) - 2
    sizes, strides, pads = _windows(x, kernel, stride, padding)
    # Without dilations the CPU plugin crashes.
    window = {"kernel_shape": sizes, "rounding_type": _rounding(ceil), "dilations": [1] * dims}
    counted = ceil and padded
    result = op.avg_pool(x, strides, pads, pads, exclude_pad=counted or not padded, **window)
    if not counted or not any(pads):
        return result.output(0)
    # torch counts the padding, but not the part of a last window beyond it. OpenVINO counts both or none. So the
    # padding becomes part of the image, and windows that start in it are cut off.
    edge = b.axes([0, 0, *pads])
    wide = op.pad(x, edge, edge, "constant", b.cast(0.0, x.get_element_type()))
    whole = op.avg_pool(wide, strides, [0] * dims, [0] * dims, exclude_pad=True, **window)
    axes = list(range(2, 2 + dims))
    ends = op.gather(op.shape_of(result, "i64"), b.axes(axes), b.scalar(0, ov.Type.i64))
    return op.slice(whole, b.axes([0] * dims), ends, b.axes([1] * dims), b.axes(axes)).output(0)


def _known_output(call: Call) -> str | None:
    known = all(isinstance(size, int) for size in call.fake("output_size"))
    return _taken(call) if known else "the output size is not fixed"


@lowers(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, refuses=_known_output)
def adaptive_avg_pool(b: Builder, x: Output, size: list[int]) -> Output:
    if all(length == 1 for length in size):
        return op.reduce_mean(x, b.axes(list(range(2, rank(x)))), True).output(0)
    return op.adaptive_avg_pool(x, b.axes(size)).output(0)
