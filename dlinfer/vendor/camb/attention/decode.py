"""Decode attention over pages: one call of single_query_cached_kv_attn for all sequences, with one new token each.

Rows of length 0 (padding) are left out of the call, because the op documents no length of 0. During a capture the
lengths cannot be read from the card. So in a captured step padding rows have length 1 (``CambDevice.padding_length``).
"""

from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.camb import layouts, refusing
from dlinfer.vendor.camb.attention import fused
from dlinfer.vendor.camb.sdk import cards, tmo

_PAGES = (1, 2, 4, 8, 16, 32, 64)
_MOST_SHARING = 128
"""The most query heads for each key head. The vendor's own vLLM splits calls with more (for bfloat16, above 256)."""
_UNCERTAIN = -1
"""The max_context_len for an unknown maximum. torch_mlu_ops' documents say that 0 and below mean "unknown"."""


def _refuses(call: Any) -> str | None:
    sharing = call.num_q_heads // call.num_kv_heads
    if sharing > _MOST_SHARING:
        return f"up to {_MOST_SHARING} query heads may share a KV head, not {sharing}"
    return fused.refuses(call) or fused.refuses_pages(call, _PAGES)


@refusing.where(_refuses)
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
    if kv_seqlens.device == q.device and cards().is_current_stream_capturing():
        own = layouts.index(kv_seqlens, q.device)
        _attend(q, k_cache, v_cache, block_offsets, own, _UNCERTAIN, attn_output, softmax_scale, window_left)
        return
    lengths = kv_seqlens.tolist()
    kept = [row for row, length in enumerate(lengths) if length]
    if len(kept) == len(lengths):
        if lengths:
            own, most = torch.tensor(lengths, dtype=torch.int32, device=q.device), max(lengths)
            _attend(q, k_cache, v_cache, block_offsets, own, most, attn_output, softmax_scale, window_left)
        return
    # padding rows have no key, and none of their blocks may be read
    rows = torch.tensor(kept, dtype=torch.int64, device=q.device)
    q, tables = q[rows], block_offsets[rows.to(block_offsets.device)]
    out = torch.empty((len(kept), *attn_output.shape[1:]), dtype=q.dtype, device=q.device)
    if kept:
        own = torch.tensor([lengths[row] for row in kept], dtype=torch.int32, device=q.device)
        _attend(q, k_cache, v_cache, tables, own, max(lengths), out, softmax_scale, window_left)
    attn_output.zero_()
    attn_output[rows] = out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    lengths: Tensor,
    longest: int,
    attn_output: Tensor,
    softmax_scale: float,
    window_left: int,
) -> None:
    """Write the attention into attn_output. lengths: int32 on the card, none of them 0."""
    out = fused.destination(attn_output, q)
    latent = layouts.is_latent(k_cache, v_cache)
    tmo().single_query_cached_kv_attn(
        layouts.heads(q).unsqueeze(1),
        k_cache,
        None if latent else v_cache,
        out.unsqueeze(1),
        layouts.index(block_offsets, q.device),
        lengths,
        None,
        None,
        None,
        longest,
        window_left,
        -1,
        softmax_scale,
        head_size_v=v_cache.shape[-1] if latent else -1,
    )
    if out is not attn_output:
        attn_output.copy_(out)
