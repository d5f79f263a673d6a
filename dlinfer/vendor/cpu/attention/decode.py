"""Decode attention on CPU: by a C++ kernel (csrc/attention/decode.cpp) or by torch.

The C++ kernel reads pages in place. The torch version copies them, and is the only kernel for quantised caches.
"""

import torch
from torch import Tensor

from dlinfer.vendor.cpu.attention.gathered_decode import gathered_decode
from dlinfer.vendor.cpu.attention.kv_cache import Pages
from dlinfer.vendor.cpu.attention.misfit import is_dense, misfit
from dlinfer.vendor.cpu.compiled import compiled, fall_back

_OP = "paged_decode_attention"


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    block_size: int,
    kv_seqlens: Tensor,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_output: Tensor,
    softmax_scale: float,
    window_left: int,
    logit_softcapping: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    reason = misfit(q, {"k_cache": k_cache, "v_cache": v_cache})
    if reason is not None:
        fall_back(_OP, reason, (q, k_cache, v_cache))
    kernel = compiled(_OP, q) if reason is None else None
    if kernel is None:
        sizes = (num_q_heads, num_kv_heads)
        options = (softmax_scale, window_left, logit_softcapping, alibi_slopes, sinks)
        caches = (Pages(k_cache), Pages(v_cache))
        gathered_decode(q, caches, block_offsets, kv_seqlens, *sizes, attn_output, *options)
        return
    out = attn_output if is_dense(attn_output) else torch.empty_like(attn_output).contiguous()
    kernel(
        q if is_dense(q) else q.contiguous(),
        k_cache,
        v_cache,
        block_offsets,
        kv_seqlens.cpu(),
        out,
        softmax_scale,
        window_left,
        logit_softcapping,
        None if alibi_slopes is None else alibi_slopes.float(),
        None if sinks is None else sinks.float(),
    )
    if out is not attn_output:
        attn_output.copy_(out)


def quantised_paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    block_size: int,
    kv_seqlens: Tensor,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_output: Tensor,
    softmax_scale: float,
    window_left: int,
    logit_softcapping: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scales_zeros: Tensor,
    v_scales_zeros: Tensor,
    quant_bits: int,
) -> None:
    sizes = (num_q_heads, num_kv_heads)
    options = (softmax_scale, window_left, logit_softcapping, alibi_slopes, sinks)
    caches = (Pages(k_cache, k_scales_zeros, quant_bits), Pages(v_cache, v_scales_zeros, quant_bits))
    gathered_decode(q, caches, block_offsets, kv_seqlens, *sizes, attn_output, *options)
