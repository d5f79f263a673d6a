"""Linear layers of 8-bit weights on CPU."""

import torch
from torch import Tensor

from dlinfer.ops.quantised import eight_bit
from dlinfer.vendor.cpu.eight_bit import rows
from dlinfer.vendor.cpu.eight_bit.products import (
    fp8_product,
    int8_product,
    scaled_fp8_product,
    scaled_int8_product,
)


def _rows(x: Tensor) -> Tensor:
    """Reshape [..., in_features] to [rows, in_features]; there may be 0 rows."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def linear_w8a8(
    a: Tensor,
    b: Tensor,
    rms_scale: Tensor,
    linear_scale: Tensor,
    out_dtype: torch.dtype,
    quant_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    product = scaled_int8_product if quant_dtype is torch.int8 else scaled_fp8_product
    out = product(_rows(a), rms_scale.reshape(-1), b, linear_scale.reshape(-1), out_dtype, bias)
    return out.view(*a.shape[:-1], b.shape[0])


def linear_w8a8_static(
    x: Tensor,
    weight: Tensor,
    input_scale: Tensor,
    input_offset: Tensor,
    deq_scale: Tensor,
    out_dtype: torch.dtype,
    quant_dtype: torch.dtype,
    quant_bias: Tensor | None,
) -> Tensor:
    shifted = x.to(torch.float32).div(input_scale.to(torch.float32)).add_(input_offset)
    numbers = shifted.round_().clamp_(-128, 127).to(torch.int8)
    total = int8_product(_rows(numbers), weight)
    if quant_bias is not None:
        total += quant_bias
    out = total.to(deq_scale.dtype).mul_(deq_scale.reshape(-1)).to(out_dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_blocked_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    block_size: int,
    power_of_two_scales: bool,
) -> Tensor:
    kept = rows.rounded_in_blocks(_rows(x), block_size, power_of_two_scales)
    out = fp8_product(kept, weight, weight_scale, (block_size, block_size), x.dtype, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_static_fp8(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor, bias: Tensor | None
) -> Tensor:
    kept = _rows(eight_bit.rounded_by(x, input_scale))
    out = fp8_product(kept, weight, weight_scale.reshape(-1, 1), (1, weight.shape[1]), x.dtype, bias)
    return out.view(*x.shape[:-1], weight.shape[0])
