"""Attention by flash_attn: of prompts to their own new tokens or to pages, and of decode steps.

``latent`` serves latent caches by flash_mla. flash_attn aligns a window with the last key and returns zeros for a query
that sees no key, like dlinfer's ops.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.vendor.maca import latent, refusing, sdk, sequences

_ALIGNED, _WIDEST = 8, 512
"""Head sizes are multiples of 8, up to 512 in vLLM-metax. The original flash-attention ends at 256."""
_PAGE = 16
"""Block sizes of a cache are multiples of 16 (vLLM-metax)."""


def _refuses(call: Any, size: int) -> str | None:
    if size > _WIDEST:
        return f"head sizes up to {_WIDEST}, and {latent.KEYS} for a latent cache, are supported, not {size}"
    if call.alibi_slopes is not None and call.sinks is not None:
        return "no published code uses alibi_slopes and s_aux together"
    return refusing.floating(call.q, refusing.HALVES)


def _refuses_prompt(call: Any) -> str | None:
    if latent.fits(call.k, call.v):
        return latent.refuses(call)
    return _refuses(call, max(call.k.shape[-1], call.v.shape[-1]))


def _refuses_pages(call: Any) -> str | None:
    keys, values = call.k_cache, call.v_cache
    if latent.fits(keys, values):
        return latent.refuses_pages(call)
    if keys.shape != values.shape:
        return "paged keys and values must have the same head size, or those of a latent cache"
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        return "the heads of a cache are not contiguous"
    return refusing.first(
        (
            refusing.multiples(_PAGE, block_size=call.block_size),
            refusing.multiples(_ALIGNED, head_size=call.q.shape[-1]),
            _refuses(call, call.q.shape[-1]),
        )
    )


def _sight(causal: bool, left: int, right: int) -> dict[str, Any]:
    return {
        "causal": causal,
        "window_size": (left, 0 if causal and left >= 0 else right if not causal else -1),
    }


def _extras(q: Tensor, cap: float, alibi_slopes: Tensor | None, sinks: Tensor | None) -> dict[str, Any]:
    """Return the arguments for softcap, ALiBi and sinks.

    Only MetaX's flash_attn has the argument s_aux, so it is passed only if there are sinks.
    """
    slopes = None if alibi_slopes is None else alibi_slopes.float().contiguous()
    options: dict[str, Any] = {"softcap": cap, "alibi_slopes": slopes}
    return options if sinks is None else options | {"s_aux": sinks.to(q.dtype).contiguous()}


@refusing.where(_refuses_prompt)
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
    new, keys = sequences.counts(q_ends), kv_seqlens.tolist()
    if sum(new) == 0:
        return
    if latent.fits(k, v):
        latent.attend_to_tokens(q, k, v, new, keys, attn_output, softmax_scale, causal)
        return
    size = -(-max(k.shape[-1], v.shape[-1]) // _ALIGNED) * _ALIGNED
    out = sdk.flash_attn().flash_attn_varlen_func(
        q=_widened(q, size),
        k=_widened(k, size),
        v=_widened(v, size),
        cu_seqlens_q=sequences.ends(new, q.device),
        cu_seqlens_k=sequences.ends(keys, q.device),
        max_seqlen_q=max(new),
        max_seqlen_k=max(keys),
        softmax_scale=softmax_scale,
        **_sight(causal, window_left, window_right),
        **_extras(q, logit_softcapping, alibi_slopes, sinks),
    )
    attn_output[: sum(new)] = out[: sum(new), :, : v.shape[-1]]


def _widened(x: Tensor, size: int) -> Tensor:
    """Return x with zeros appended to the last dimension up to ``size``. The zeros do not change attention scores."""
    return functional.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else sequences.whole(x)


@refusing.where(_refuses_pages)
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
    new, keys = sequences.counts(q_ends), kv_seqlens.tolist()
    if sum(new) == 0:
        return
    if latent.fits(k_cache, v_cache):
        pages = latent.pages(k_cache, v_cache)
        latent.attend_to_pages(q, pages, block_offsets, new, keys, attn_output, softmax_scale, causal)
        return
    out = sdk.flash_attn().flash_attn_varlen_func(
        q=sequences.whole(q),
        k=k_cache,
        v=v_cache,
        cu_seqlens_q=sequences.ends(new, q.device),
        cu_seqlens_k=sequences.ends(keys, q.device),
        max_seqlen_q=max(new),
        max_seqlen_k=max(keys),
        softmax_scale=softmax_scale,
        block_table=block_offsets.to(torch.int32).contiguous(),
        **_sight(causal, window_left, window_right),
        **_extras(q, logit_softcapping, alibi_slopes, sinks),
    )
    attn_output[: sum(new)] = out[: sum(new)]


@refusing.where(_refuses_pages)
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
    if q.shape[0] == 0:
        return
    if latent.fits(k_cache, v_cache):
        pages = latent.pages(k_cache, v_cache)
        latent.decode(q, pages, block_offsets, kv_seqlens, attn_output, softmax_scale)
        return
    out = sdk.flash_attn().flash_attn_with_kvcache(
        q=sequences.whole(q).unsqueeze(1),
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=sequences.of_sequences(kv_seqlens, q.device),
        block_table=block_offsets.to(torch.int32).contiguous(),
        softmax_scale=softmax_scale,
        **_sight(True, window_left, -1),
        **_extras(q, logit_softcapping, alibi_slopes, sinks),
    )
    attn_output.copy_(out.squeeze(1))
