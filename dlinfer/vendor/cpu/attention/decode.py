"""Decode attention on CPU: in C++ (csrc/decode.cpp) over the pages where they lie, or by torch over copies of them."""

import torch
from torch import Tensor

from dlinfer.vendor.cpu.attention.gathered_decode import gathered_decode
from dlinfer.vendor.cpu.attention.kv_cache import Pages
from dlinfer.vendor.cpu.compiled import compiled

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    fits = q.dtype in _DTYPES and all(map(_is_dense, (k_cache, v_cache, attn_output)))
    kernel = compiled("paged_decode_attention", q) if fits else None
    if kernel is None:
        sizes = (num_q_heads, num_kv_heads)
        options = (softmax_scale, window_left, logit_softcapping, alibi_slopes, sinks)
        caches = (Pages(k_cache), Pages(v_cache))
        gathered_decode(q, caches, block_offsets, kv_seqlens, *sizes, attn_output, *options)
        return
    kernel(
        q if _is_dense(q) else q.contiguous(),
        k_cache,
        v_cache,
        block_offsets,
        kv_seqlens.cpu(),
        attn_output,
        softmax_scale,
        window_left,
        logit_softcapping,
        None if alibi_slopes is None else alibi_slopes.float(),
        None if sinks is None else sinks.float(),
    )


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


def _is_dense(x: Tensor) -> bool:
    """Whether neighbours along the last dimension are neighbours in memory."""
    return x.shape[-1] <= 1 or x.stride(-1) == 1
