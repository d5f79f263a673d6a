"""Translate 3D convolutions. For a convolution without bias, torch.onnx would add a bias of a wrong shape."""

from collections.abc import Sequence

import torch

from dlinfer.graph.onnx.translations.writing import Value, op, rank, translates


@translates(torch.ops.aten.conv3d.default)
def conv3d(
    input: Value,
    weight: Value,
    bias: Value = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Value:
    """Return the convolution of an input [batch, in, D, H, W] or [in, D, H, W]."""
    batched = rank(input) == rank(weight)
    operands = (input if batched else op.Unsqueeze(input, [0]), weight, *(() if bias is None else (bias,)))
    result = op.Conv(
        *operands,
        strides=_three(stride),
        pads=2 * _three(padding),
        dilations=_three(dilation),
        group=groups,
    )
    return result if batched else op.Squeeze(result, [0])


def _three(sizes: Sequence[int]) -> list[int]:
    return list(sizes) * 3 if len(sizes) == 1 else list(sizes)
