"""Convolutions of one to three dimensions."""

from collections.abc import Sequence
from typing import Any

import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.shapes import channels, rank
from dlinfer.vendor.openvino.registry import Call, lowers

aten = torch.ops.aten


def spread(value: Any, dims: int) -> list[int]:
    """Return one number for each of ``dims`` dimensions. value: such a list, one number, or a list of one number."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _taken(call: Call) -> str | None:
    if not call.result.is_floating_point():
        return "the convolution is over integers"
    weight = call.fake("weight")
    if any(fixed_size(size) is None for size in weight.shape):
        return "the kernel size is not fixed"
    if call.fake("input").dim() != weight.dim():
        return "the image has no batch dimension"
    return None


def _grouped(b: Builder, weight: Output, groups: int, sizes: Sequence[int]) -> Output:
    """Reshape a weight from [out, in, ...] to [groups, out / groups, in, ...].

    The weight of a transposed convolution has ``in`` first, and ``in`` is split. sizes: the weight's sizes.
    """
    shape = [groups, sizes[0] // groups, *sizes[1:]]
    return op.reshape(weight, b.axes(shape), False).output(0)


def _edges(padding: Any, sizes: Sequence[int], dilations: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the padding before and after each dimension of an image. padding: numbers, "same" or "valid"."""
    dims = len(dilations)
    if not isinstance(padding, str):
        return spread(padding, dims), spread(padding, dims)
    total = [dilations[i] * (sizes[2 + i] - 1) if padding == "same" else 0 for i in range(dims)]
    return [size // 2 for size in total], [size - size // 2 for size in total]


@lowers(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, refuses=_taken)
@lowers(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding, refuses=_taken)
@lowers(aten.convolution.default, refuses=_taken)
def conv(
    b: Builder,
    x: Output,
    weight: Output,
    bias: Output | None,
    *,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    transposed: bool = False,
    output_padding: Any = 0,
) -> Output:
    dims = rank(x) - 2
    sizes = [int(fixed_size(size) or 0) for size in b.call.fake("weight").shape]
    kernel = weight if groups == 1 else _grouped(b, weight, groups, sizes)
    strides, dilations = spread(stride, dims), spread(dilation, dims)
    before, after = _edges(padding, sizes, dilations)
    if transposed:
        convolve = op.convolution_backprop_data if groups == 1 else op.group_convolution_backprop_data
        more = spread(output_padding, dims)
        result = convolve(x, kernel, strides, None, before, after, dilations, output_padding=more)
    else:
        convolve = op.convolution if groups == 1 else op.group_convolution
        result = convolve(x, kernel, strides, before, after, dilations)
    if bias is not None:
        result = op.add(result, channels(b, bias, rank(x)))
    return result.output(0)


@lowers(
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input, refuses=_taken
)
def conv_transpose(
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
    geometry = {"stride": stride, "padding": padding, "output_padding": output_padding}
    return conv(b, x, weight, bias, **geometry, groups=groups, dilation=dilation, transposed=True)
