"""Matrix products with weights of the model's dtype, of 8 bits, and of 4 bits."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.ops.quantised.packing import AWQ
from dlinfer.vendor.base import refuses
from dlinfer.vendor.maca import refusing
from dlinfer.vendor.maca.kept import Kept


@refuses(lambda x, weight, bias: refusing.floating(x))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


def _refuses_w8a8(b: Tensor, out_dtype: torch.dtype, quant_dtype: torch.dtype) -> str | None:
    if out_dtype not in refusing.HALVES:
        return f"cutlass_scaled_mm returns float16 or bfloat16, not {out_dtype}"
    return refusing.eight_bits(quant_dtype) or refusing.multiples(16, columns=b.shape[0], inner=b.shape[1])


@refuses(
    lambda a, b, rms_scale, linear_scale, out_dtype, quant_dtype, bias: _refuses_w8a8(
        b, out_dtype, quant_dtype
    )
)
def linear_w8a8(
    a: Tensor,
    b: Tensor,
    rms_scale: Tensor,
    linear_scale: Tensor,
    out_dtype: torch.dtype,
    quant_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    out = a.new_empty((*a.shape[:-1], b.shape[0]), dtype=out_dtype)
    if out.numel():
        torch.ops._C.cutlass_scaled_mm(
            out.view(-1, b.shape[0]),
            refusing.rows(a),
            refusing.rows(b).t(),  # in columns
            rms_scale.reshape(-1, 1).float().contiguous(),
            linear_scale.reshape(-1, 1).float().contiguous(),
            None if bias is None else bias.contiguous(),
        )
    return out


# --- 4 bits

_GROUPS = (32, 64, 128)
"""Group sizes of awq_gemm, besides multiples of 128. For other sizes awq_gemm prints a message and returns zeros."""


def _refuses_four_bits(x: Tensor, qweight: Tensor, scales: Tensor, group_size: int) -> str | None:
    inner, columns = qweight.shape[0], scales.shape[1]
    group = group_size or inner
    if group not in _GROUPS and group % _GROUPS[-1]:
        return f"awq_gemm needs a group size of 32, 64 or a multiple of 128, not {group}"
    return refusing.first(
        (
            refusing.multiples(group, in_features=inner),
            refusing.multiples(16, out_features=columns),
            refusing.floating(x, refusing.HALVES),
        )
    )


@refuses(
    lambda x, qweight, scales, offset, bias, group_size: _refuses_four_bits(x, qweight, scales, group_size)
)
def weight_quant_matmul(
    x: Tensor, qweight: Tensor, scales: Tensor, offset: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    shape = (*x.shape[:-1], scales.shape[1])
    if x.numel() == 0 or 0 in shape:
        empty = x.new_zeros(shape)
        return empty if bias is None else empty + bias.to(x.dtype)
    words, steps, zeros = _prepared.of(x.dtype, qweight, scales, offset)
    rows, brain = refusing.rows(x), x.dtype is torch.bfloat16
    # bfloat16 is summed here, in float32; float16 does without
    sums = torch.zeros(rows.shape[0] if brain else 0, shape[-1], device=x.device)
    out = torch.ops._C.awq_gemm(rows, words, steps, zeros, AWQ.per_word, sums, brain)
    if bias is not None:
        out += bias.to(x.dtype)
    return out.view(shape)


def _prepare(
    dtype: Any, qweight: Tensor, scales: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert AWQ's weights to awq_gemm's layout, where a word packs neighbours along the inner dimension."""
    words = torch.ops._C.awq_to_gptq_4bit(qweight.contiguous())
    if offset is None:
        middle = int.from_bytes(bytes([AWQ.middle * 0x11] * 4), "little", signed=True)
        offset = qweight.new_full((scales.shape[0], qweight.shape[1]), middle)
    return words, scales.to(dtype).contiguous(), offset.contiguous()


_prepared = Kept(_prepare)
