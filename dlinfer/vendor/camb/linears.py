"""Matrix products with weights of the model's dtype and of 8 bits."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.vendor.base import refuses
from dlinfer.vendor.camb import layouts, refusing
from dlinfer.vendor.camb.sdk import tmo


@refuses(lambda x, weight, bias: refusing.floating(x))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() == 0 or weight.numel() == 0:  # nothing to multiply
        return functional.linear(x, weight, bias)
    as_stored = not weight.t().is_contiguous()  # else its columns are contiguous: pass [in, out]
    out = tmo().matmul(
        layouts.rows(x),
        weight.contiguous() if as_stored else weight.t(),
        None if bias is None else bias.contiguous(),
        trans_b=as_stored,
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def _refuses_w8a8(call: Any) -> str | None:
    return refusing.eight_bits(call.quant_dtype) or refusing.dtype(call.out_dtype, refusing.HALVES)


@refusing.where(_refuses_w8a8)
def linear_w8a8(
    a: Tensor,
    b: Tensor,
    rms_scale: Tensor,
    linear_scale: Tensor,
    out_dtype: torch.dtype,
    quant_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    shape = (*a.shape[:-1], b.shape[0])
    if a.numel() == 0 or b.numel() == 0:
        empty = a.new_zeros(shape, dtype=out_dtype)
        return empty if bias is None else empty + bias
    out = tmo().scaled_matmul(
        layouts.rows(a),
        b.contiguous(),
        rms_scale.reshape(-1).float().contiguous(),
        linear_scale.reshape(-1).float().contiguous(),
        out_dtype,
        None if bias is None else bias.contiguous(),
        a_quant_bit_size=8,
    )
    return out.view(shape)
