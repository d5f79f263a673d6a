"""Attention of prompts, over their own new tokens or over pages, and of one token a sequence, by flash_attn.

flash-attention's bounds of a window are the interface's, counted alike from the bottom right, and a query that sees no
key gives zeros in both.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.vendor.base import refuses
from dlinfer.vendor.maca import refusing, sdk

_ALIGNED, _WIDEST = 8, 512
"""Head sizes: multiples of the first up to the second (vLLM-metax; flash-attention itself ends at 256)."""
_PAGE = 16
"""Blocks of a cache are a multiple of it (vLLM-metax)."""


def _refuses(q: Tensor, size: int, alibi_slopes: Tensor | None, sinks: Tensor | None) -> str | None:
    if size > _WIDEST:
        return f"head sizes up to {_WIDEST} are served, not {size}"
    if alibi_slopes is not None and sinks is not None:
        return "alibi_slopes and s_aux together are used nowhere that is published"
    return refusing.floating(q, refusing.HALVES)


def _refuses_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_size: int, alibi: Tensor | None, sinks: Tensor | None
) -> str | None:
    if k_cache.shape != v_cache.shape:
        return "keys and values in pages must have one head size"
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        return "heads of a cache have gaps"
    return refusing.first(
        (
            refusing.multiples(_PAGE, block_size=block_size),
            refusing.multiples(_ALIGNED, head_size=q.shape[-1]),
            _refuses(q, q.shape[-1], alibi, sinks),
        )
    )


@lru_cache(maxsize=16)
def _on_card(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 on the card, which every layer of a step asks for; it is read only."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    """flash_attn's cu_seqlens of so many sequences: where each begins, and the end."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return _on_card(tuple(ends), device)


def _of_sequences(kv_seqlens: Tensor, device: torch.device) -> Tensor:
    """Lengths as flash_attn reads them; those on the card stay there, which a graph needs."""
    if kv_seqlens.device == device:
        return kv_seqlens.to(torch.int32).contiguous()
    return _on_card(tuple(kv_seqlens.tolist()), device)


def _sight(causal: bool, left: int, right: int) -> dict[str, Any]:
    return {
        "causal": causal,
        "window_size": (left, 0 if causal and left >= 0 else right if not causal else -1),
    }


def _extras(q: Tensor, cap: float, alibi_slopes: Tensor | None, sinks: Tensor | None) -> dict[str, Any]:
    """Keywords that few models need; s_aux, which is MetaX's own, only where there are sinks."""
    slopes = None if alibi_slopes is None else alibi_slopes.float().contiguous()
    found: dict[str, Any] = {"softcap": cap, "alibi_slopes": slopes}
    return found if sinks is None else found | {"s_aux": sinks.to(q.dtype).contiguous()}


def _lengths(ends: Tensor) -> list[int]:
    """Tokens of each sequence; waits for the card where the numbers lie there, and LMDeploy's lie on the host."""
    numbers = ends.tolist()
    return [end - start for start, end in zip([0, *numbers[:-1]], numbers, strict=True)]


@refuses(
    lambda q, k, v, ends, lens, most, heads, kv_heads, out, scale, causal, left, right, cap, alibi, sinks: (
        _refuses(q, max(k.shape[-1], v.shape[-1]), alibi, sinks)
    )
)
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
    new, keys = _lengths(q_ends), kv_seqlens.tolist()
    if sum(new) == 0:
        return
    size = -(-max(k.shape[-1], v.shape[-1]) // _ALIGNED) * _ALIGNED
    out = sdk.flash_attn().flash_attn_varlen_func(
        q=_widened(q, size),
        k=_widened(k, size),
        v=_widened(v, size),
        cu_seqlens_q=_ends(new, q.device),
        cu_seqlens_k=_ends(keys, q.device),
        max_seqlen_q=max(new),
        max_seqlen_k=max(keys),
        softmax_scale=softmax_scale,
        **_sight(causal, window_left, window_right),
        **_extras(q, logit_softcapping, alibi_slopes, sinks),
    )
    attn_output[: sum(new)] = out[: sum(new), :, : v.shape[-1]]


def _widened(x: Tensor, size: int) -> Tensor:
    """x [..., smaller] with zeros up to ``size``: they add nothing to scores, and are cut off values."""
    return functional.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else _whole(x)


def _whole(x: Tensor) -> Tensor:
    """x with the numbers of a head side by side; heads and tokens may lie anywhere."""
    return x if x.stride(-1) == 1 else x.contiguous()


@refuses(
    lambda q, k, v, table, block_size, ends, lens, most, most_kv, heads, kv_heads, *rest: _refuses_pages(
        q, k, v, block_size, *rest[-2:]
    )
)
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
    new, keys = _lengths(q_ends), kv_seqlens.tolist()
    if sum(new) == 0:
        return
    out = sdk.flash_attn().flash_attn_varlen_func(
        q=_whole(q),
        k=k_cache,
        v=v_cache,
        cu_seqlens_q=_ends(new, q.device),
        cu_seqlens_k=_ends(keys, q.device),
        max_seqlen_q=max(new),
        max_seqlen_k=max(keys),
        softmax_scale=softmax_scale,
        block_table=block_offsets.to(torch.int32).contiguous(),
        **_sight(causal, window_left, window_right),
        **_extras(q, logit_softcapping, alibi_slopes, sinks),
    )
    attn_output[: sum(new)] = out[: sum(new)]


@refuses(
    lambda q, k, v, table, block_size, lens, most, heads, kv_heads, out, scale, left, cap, alibi, sinks: (
        _refuses_pages(q, k, v, block_size, alibi, sinks)
    )
)
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
    out = sdk.flash_attn().flash_attn_with_kvcache(
        q=_whole(q).unsqueeze(1),
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=_of_sequences(kv_seqlens, q.device),
        block_table=block_offsets.to(torch.int32).contiguous(),
        softmax_scale=softmax_scale,
        **_sight(True, window_left, -1),
        **_extras(q, logit_softcapping, alibi_slopes, sinks),
    )
    attn_output.copy_(out.squeeze(1))
