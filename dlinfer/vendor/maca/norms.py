"""RMS norms: plain, after a residual sum, and followed by quantisation to 8 bits."""

import torch
from torch import Tensor

from dlinfer.vendor.base import refuses
from dlinfer.vendor.maca import refusing


@refuses(lambda x, weight, eps: refusing.floating(x))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normalised(x, weight, eps)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = x.new_empty(x.shape)
    if x.numel():
        torch.ops._C.rms_norm(out.view(-1, x.shape[-1]), refusing.rows(x), weight.contiguous(), eps)
    return out


@refuses(lambda x, residual, weight, eps: refusing.floating(x))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _added(x, residual, weight, eps)


def _added(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and x + residual.

    The vendor's op overwrites its two inputs, so it gets copies of x and residual.
    """
    if x.numel() == 0:
        return x.new_empty(x.shape), x.new_empty(x.shape)
    normalised, total = refusing.copied_rows(x), refusing.copied_rows(residual)
    torch.ops._C.fused_add_rms_norm(normalised, total, weight.contiguous(), eps)
    return normalised.view(x.shape), total.view(x.shape)


# --- 8 bits


def _refuses_eight_bits(x: Tensor, quant_dtype: torch.dtype) -> str | None:
    return refusing.eight_bits(quant_dtype) or refusing.floating(x)


@refuses(lambda x, weight, eps, quant_dtype: _refuses_eight_bits(x, quant_dtype))
def rms_norm_w8a8(x: Tensor, weight: Tensor, eps: float, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return quantised(_normalised(x, weight, eps))


@refuses(lambda x, residual, weight, eps, quant_dtype: _refuses_eight_bits(x, quant_dtype))
def add_rms_norm_w8a8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quant_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    normalised, total = _added(x, residual, weight, eps)
    return *quantised(normalised), total


@refuses(_refuses_eight_bits)
def dynamic_quant(x: Tensor, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    numbers, scale = quantised(x)
    return numbers, scale.clamp(min=_LEAST)


_LEAST = 1e-7 / 127
"""The scale of a token whose elements are all zero (``ops.quantised.eight_bit``)."""


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in int8, and the scale of each row, [..., 1].

    The vendor divides a row of zeros by its scale 0, so the numbers of these rows are set to 0.
    """
    numbers = x.new_empty(x.shape, dtype=torch.int8)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if x.numel():
        flat = numbers.view(-1, x.shape[-1]), refusing.rows(x), scale.view(-1, 1)
        torch.ops._C.dynamic_scaled_int8_quant(*flat, None)
        numbers.masked_fill_(scale == 0, 0)
    return numbers, scale
