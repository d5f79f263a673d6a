"""Attention of prompts to their own new tokens, and to pages."""

from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import KernelDeclined
from dlinfer.vendor.ascend import refusing
from dlinfer.vendor.ascend.attention import fused, latent

_PAGE, _LARGEST_PAGE = 128, 512  # for several queries: blocks are multiples of the first, up to the second


def _refuses(call: Any) -> str | None:
    if latent.fits(call.num_kv_heads, call.k.shape[-1], call.v.shape[-1]):
        return latent.refuses(call)
    return fused.refuses(call, max(call.k.shape[-1], call.v.shape[-1]))


@refusing.where(_refuses)
def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    kv_seqlens: Tensor,
    max_q_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_output: Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    logit_softcapping: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    spans = list(zip(q_ends.tolist(), kv_seqlens.tolist(), strict=True))
    if latent.fits(num_kv_heads, k.shape[-1], v.shape[-1]):
        latent.attend_to_tokens(q, k, v, spans, softmax_scale, attn_output)
        return
    size, size_v = fused.aligned(max(k.shape[-1], v.shape[-1])), v.shape[-1]
    rows, start, first = [], 0, 0
    for end, length in spans:
        last, blind = first + length, _blind(end - start, length, causal, window_left, window_right)
        rows.append(q.new_zeros(blind, num_q_heads, size_v))
        start += blind
        if end - start == 1:  # the op ignores masks: pass only the visible keys
            seen: dict[str, Any] = {"sparse_mode": 0}
            first = last - min(length, window_left + 1 if window_left >= 0 else length)
        else:
            seen = fused.sight(q.device, causal, window_left, window_right)
        if end > start:
            parts = q[start:end], k[first:last], v[first:last]
            new, keys, values = (fused.widened(part, size).unsqueeze(0) for part in parts)
            out = fused.attend(new, keys, values, num_kv_heads, softmax_scale, **seen)
            rows.append(out[0, ..., :size_v])
        start, first = end, last
    if rows:  # written when all of q has been read
        attn_output[:start] = torch.cat(rows)


def _blind(q_len: int, length: int, causal: bool, left: int, right: int) -> int:
    """Return the number of queries at a sequence's start that see no key: more than 0 if it has more queries than keys.

    Raises KernelDeclined for more queries than keys in a window that is not causal. There a query before the first key
    may still see the keys after its position.
    """
    blind = max(0, q_len - length) if causal or left >= 0 or right >= 0 else 0
    if blind and length and not causal:
        raise KernelDeclined(
            reason=f"{q_len} queries over {length} keys are not supported with a window that is not causal"
        )
    return blind if length else q_len


def _refuses_paged(call: Any) -> str | None:
    if latent.fits(call.num_kv_heads, call.k_cache.shape[-1], call.v_cache.shape[-1]):
        return latent.refuses(call, call.block_size)
    page = (_PAGE, _LARGEST_PAGE) if call.max_q_seq_len > 1 else (16, 1 << 16)
    return fused.refuses(call, call.q.shape[-1]) or fused.refuses_pages(call, *page)


@refusing.where(_refuses_paged)
def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    block_size: int,
    q_ends: Tensor,
    kv_seqlens: Tensor,
    max_q_seq_len: int,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_output: Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    logit_softcapping: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    spans = list(zip(q_ends.tolist(), kv_seqlens.tolist(), strict=True))
    if latent.fits(num_kv_heads, k_cache.shape[-1], v_cache.shape[-1]):
        latent.attend_to_pages(q, k_cache, v_cache, block_offsets, spans, softmax_scale, attn_output)
        return
    keys, values, tables = fused.pages(k_cache), fused.pages(v_cache), fused.table(block_offsets)
    rows, start = [], 0
    for index, (end, length) in enumerate(spans):
        blind = _blind(end - start, length, causal, window_left, window_right)
        rows.append(q.new_zeros(blind, num_q_heads, v_cache.shape[-1]))
        start += blind
        if end > start:
            out = fused.attend(
                q[start:end].contiguous().unsqueeze(0),
                keys,
                values,
                num_kv_heads,
                softmax_scale,
                block_table=tables[index : index + 1],
                block_size=block_size,
                actual_seq_lengths=[end - start],
                actual_seq_lengths_kv=[length],
                **_seen(
                    q, end - start, length, tables.shape[1] * block_size, (causal, window_left, window_right)
                ),
            )
            rows.append(out[0])
        start = end
    if rows:
        attn_output[:start] = torch.cat(rows)


def _seen(q: Tensor, q_len: int, length: int, slots: int, sight: tuple[bool, int, int]) -> dict[str, Any]:
    """Return the mask arguments for the queries of one sequence.

    slots: the number of slots in its pages. sight: causal, window_left and window_right.
    """
    left = sight[1]
    if q_len > 1:
        return fused.sight(q.device, *sight)
    if 0 <= left < length - 1:
        known = torch.tensor([length], device=q.device)
        return {"sparse_mode": 0, "atten_mask": fused.outside(known, left, slots)}
    return {"sparse_mode": 0}
