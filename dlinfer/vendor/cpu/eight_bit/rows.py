"""Rows of activations as 8-bit numbers, after a norm or as they come."""

import torch
from torch import Tensor

from dlinfer.ops import dynamic_quant as quantising
from dlinfer.ops import eight_bit
from dlinfer.ops import rms_norm_w8a8 as norm
from dlinfer.vendor.cpu import native


def dynamic_quant(x: Tensor, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not is_native(x):
        return quantising.reference(x, quant_dtype)
    return torch.ops.dlinfer_cpu.dynamic_quant(x, quant_dtype)


def rms_norm_w8a8(x: Tensor, weight: Tensor, eps: float, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not is_native(x):
        return norm.reference(x, weight, eps, quant_dtype)
    return torch.ops.dlinfer_cpu.rms_norm_w8a8(x, weight, eps, quant_dtype)


def add_rms_norm_w8a8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quant_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    if not is_native(x):
        total = (x + residual).contiguous()
        return *norm.reference(total, weight, eps, quant_dtype), total
    return torch.ops.dlinfer_cpu.add_rms_norm_w8a8(x, residual, weight, eps, quant_dtype)


def rounded_in_blocks(x: Tensor, block_size: int, power_of_two: bool) -> Tensor:
    """x as float8 keeps it with a scale for each block of a row, in float32, as the ops' reference rounds it."""
    if not is_native(x):
        return eight_bit.rounded_in_blocks(x, block_size, power_of_two)
    return torch.ops.dlinfer_cpu.rounded_in_blocks(x, block_size, power_of_two)


def is_native(x: Tensor) -> bool:
    """Whether the kernels in C++ take x, and are to be had: compiled by the first call of a process that has none."""
    return x.dtype is not torch.float64 and native.why_not() is None
