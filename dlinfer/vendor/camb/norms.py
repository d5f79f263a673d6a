"""RMS norms: plain, after a residual sum, and quantised to 8 bits at once; and quantisation alone."""

import torch
from torch import Tensor

from dlinfer.vendor.base import refuses
from dlinfer.vendor.camb import layouts, refusing
from dlinfer.vendor.camb.sdk import tmo


@refuses(lambda x, weight, eps: refusing.floating(x))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.numel() == 0:
        return x.new_empty(x.shape)
    out = tmo().fused_rms_norm(layouts.rows(x), None, weight.contiguous(), None, None, eps, False)
    return out.view(x.shape)


@refuses(lambda x, residual, weight, eps: refusing.floating(x))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return x.new_empty(x.shape), x.new_empty(x.shape)
    normalised, total = tmo().fused_rms_norm(
        layouts.rows(x), layouts.rows(residual), weight.contiguous(), None, None, eps, True
    )
    return normalised.view(x.shape), total.view(x.shape)


def _refuses_eight_bits(x: Tensor, quant_dtype: torch.dtype) -> str | None:
    return refusing.eight_bits(quant_dtype) or refusing.floating(x)


@refuses(lambda x, weight, eps, quant_dtype: _refuses_eight_bits(x, quant_dtype))
def rms_norm_w8a8(x: Tensor, weight: Tensor, eps: float, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return _no_rows(x)
    numbers, scale = tmo().fused_rms_norm(
        layouts.rows(x),
        None,
        weight.contiguous(),
        None,
        None,
        eps,
        False,
        layouts.ones(x.shape[-1], x.device),
        dynamic_quant=True,
    )
    return _zeros_stay(numbers, scale).view(x.shape), scale.view(*x.shape[:-1], 1)


@refuses(lambda x, residual, weight, eps, quant_dtype: _refuses_eight_bits(x, quant_dtype))
def add_rms_norm_w8a8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quant_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return *_no_rows(x), x.new_empty(x.shape)
    numbers, total, scale = tmo().fused_rms_norm(
        layouts.rows(x),
        layouts.rows(residual),
        weight.contiguous(),
        None,
        None,
        eps,
        True,
        layouts.ones(x.shape[-1], x.device),
        dynamic_quant=True,
    )
    shown = _zeros_stay(numbers, scale).view(x.shape), scale.view(*x.shape[:-1], 1)
    return *shown, total.view(x.shape)


@refuses(_refuses_eight_bits)
def dynamic_quant(x: Tensor, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return _no_rows(x)
    numbers, scale = tmo().scaled_quantize(layouts.rows(x))
    numbers = _zeros_stay(numbers, scale)
    # a row of tiny values keeps its own scale: its numbers are finer than with the smallest scale
    scale = scale.masked_fill(scale == 0, _LEAST)
    return numbers.view(x.shape), scale.view(*x.shape[:-1], 1)


_LEAST = 1e-7 / 127
"""The scale of a token whose elements are all zero (``ops.quantised.eight_bit``)."""


def _zeros_stay(numbers: Tensor, scale: Tensor) -> Tensor:
    """Set the rows with scale 0 to zeros: the vendor divides by the scale, and documents no result for scale 0."""
    return numbers.masked_fill_((scale == 0).unsqueeze(-1), 0)


def _no_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
