"""Convolutions of one to three dimensions."""

from collections.abc import Sequence
from typing import Any

import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.graph.seam.symbols import fixed_size
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import Call, lowers

aten = torch.ops.aten


def spread(value: Any, dims: int) -> list[int]:
    """One number, or a list of one, for each dimension."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _taken(call: Call) -> str | None:
    if not call.result.is_floating_point():
        return "a convolution of whole numbers"
    weight = call.fake("weight")
    if any(fixed_size(size) is None for size in weight.shape):
        return "a kernel of a size that varies"
    if call.fake("input").dim() != weight.dim():
        return "an image without a batch"
    return None


def _biased(b: Builder, x: Output, bias: Output | None) -> Output:
    if bias is None:
        return x
    shape = b.axes([1, -1, *([1] * (rank(x) - 2))])
    return op.add(x, op.reshape(bias, shape, False)).output(0)


def _grouped(b: Builder, weight: Output, groups: int, sizes: Sequence[int]) -> Output:
    """[out, in, ...] as [groups, out / groups, in, ...]; of a transposed one the first is in."""
    shape = [groups, sizes[0] // groups, *sizes[1:]]
    return op.reshape(weight, b.axes(shape), False).output(0)


def _weight_sizes(b: Builder) -> list[int]:
    return [int(fixed_size(size) or 0) for size in b.call.fake("weight").shape]


def convolved(
    b: Builder,
    x: Output,
    weight: Output,
    bias: Output | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Output:
    dims = rank(x) - 2
    strides, dilations = spread(stride, dims), spread(dilation, dims)
    sizes = _weight_sizes(b)
    if isinstance(padding, str):
        total = [dilations[i] * (sizes[2 + i] - 1) if padding == "same" else 0 for i in range(dims)]
        before, after = [one // 2 for one in total], [one - one // 2 for one in total]
    else:
        before = after = spread(padding, dims)
    if groups == 1:
        made = op.convolution(x, weight, strides, before, after, dilations)
    else:
        made = op.group_convolution(x, _grouped(b, weight, groups, sizes), strides, before, after, dilations)
    return _biased(b, made.output(0), bias)


@lowers(
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    refuses=_taken,
)
def conv(
    b: Builder,
    x: Output,
    weight: Output,
    bias: Output | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Output:
    return convolved(b, x, weight, bias, stride, padding, dilation, groups)


def transposed(
    b: Builder,
    x: Output,
    weight: Output,
    bias: Output | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> Output:
    dims = rank(x) - 2
    strides, dilations, pads, more = (
        spread(one, dims) for one in (stride, dilation, padding, output_padding)
    )
    named = {"output_padding": more}
    if groups == 1:
        made = op.convolution_backprop_data(x, weight, strides, None, pads, pads, dilations, **named)
    else:
        kernel = _grouped(b, weight, groups, _weight_sizes(b))
        made = op.group_convolution_backprop_data(x, kernel, strides, None, pads, pads, dilations, **named)
    return _biased(b, made.output(0), bias)


@lowers(
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input, refuses=_taken
)
def conv_transpose(
    b: Builder,
    x: Output,
    weight: Output,
    bias: Output | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Output:
    return transposed(b, x, weight, bias, stride, padding, output_padding, groups, dilation)


@lowers(aten.convolution.default, refuses=_taken)
def convolution(
    b: Builder,
    x: Output,
    weight: Output,
    bias: Output | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    backwards: bool,
    output_padding: Any,
    groups: int,
) -> Output:
    if backwards:
        return transposed(b, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return convolved(b, x, weight, bias, stride, padding, dilation, groups)
