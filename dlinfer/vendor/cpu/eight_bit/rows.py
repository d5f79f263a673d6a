"""Quantise rows of activations to 8 bits, after a norm or as they are."""

import torch
from torch import Tensor

from dlinfer.ops import dynamic_quant as quantising
from dlinfer.ops import rms_norm_w8a8 as norm
from dlinfer.ops.core.checks import FLOATS
from dlinfer.ops.quantised import eight_bit
from dlinfer.vendor.cpu.compiled import compiled


def dynamic_quant(x: Tensor, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    kernel = compiled("dynamic_quant", x) if x.dtype in FLOATS else None
    return (kernel or quantising.reference)(x, quant_dtype)


def rms_norm_w8a8(x: Tensor, weight: Tensor, eps: float, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    kernel = compiled("rms_norm_w8a8", x, weight) if x.dtype in FLOATS else None
    return (kernel or norm.reference)(x, weight, eps, quant_dtype)


def add_rms_norm_w8a8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quant_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = compiled("add_rms_norm_w8a8", x, residual, weight) if x.dtype in FLOATS else None
    if kernel is not None:
        return kernel(x, residual, weight, eps, quant_dtype)
    total = (x + residual).contiguous()
    return *norm.reference(total, weight, eps, quant_dtype), total


def rounded_in_blocks(x: Tensor, block_size: int, power_of_two: bool) -> Tensor:
    """Round x to float8 with one scale for each block of a row, and return the rounded numbers in float32.

    power_of_two: round each scale up to a power of two.
    """
    kernel = compiled("rounded_in_blocks", x) if x.dtype in FLOATS else None
    return (kernel or eight_bit.rounded_in_blocks)(x, block_size, power_of_two)
