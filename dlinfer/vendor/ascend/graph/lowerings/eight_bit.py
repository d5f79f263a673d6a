"""Quantisation to 8 bits, and 8-bit products."""

import torch
from torch import Tensor

_LEAST = 1e-7 / 127
"""The scale of a token whose elements are all zero (``ops.quantised.eight_bit``)."""


def dynamic_quant(x: Tensor, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lower to ``DynamicQuant``, with a scale for each token."""
    numbers, scale = _quantised(x)
    return numbers, scale.clamp(min=_LEAST).unsqueeze(-1)


def rms_norm_w8a8(x: Tensor, weight: Tensor, eps: float, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lower to ``RmsNorm`` and ``DynamicQuant``."""
    normalised, _ = torch.ops.npu.npu_rms_norm(x, weight, eps)
    numbers, scale = _quantised(normalised)
    return numbers, scale.unsqueeze(-1)


def linear_w8a8(
    a: Tensor,
    b: Tensor,
    rms_scale: Tensor,
    linear_scale: Tensor,
    out_dtype: torch.dtype,
    quant_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """Lower to ``QuantBatchMatmulV3``."""
    rows = a if a.dim() == 2 else a.reshape(-1, a.shape[-1])
    out = torch.ops.npu.npu_quant_matmul(
        rows,
        b.t(),
        linear_scale.reshape(-1).float(),
        pertoken_scale=rms_scale.reshape(-1).float(),
        bias=bias,
        output_dtype=out_dtype,
    )
    return out if a.dim() == 2 else out.reshape(*a.shape[:-1], b.shape[0])


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each token to int8, and return the numbers and a scale for each token.

    For a token of zeros, npu_dynamic_quant returns scale 0. The vendor does not say which int8 numbers it returns then,
    so this function sets them to 0.
    """
    numbers, scale = torch.ops.npu.npu_dynamic_quant(x, dst_type=torch.int8)
    return numbers.masked_fill((scale == 0).unsqueeze(-1), 0), scale
