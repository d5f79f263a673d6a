"""Attention over DeepSeek's latent cache by flash_mla: one key head of 576 elements; the first 512 are the value.

In a call of flash_mla, all sequences have the same number of queries. In a decode step, this number is one. Prompts are
cut into pieces of up to 128 queries, vLLM-metax's limit, and pieces of equal size share a call. flash_mla reads keys
from pages only. So the keys of new tokens, which are not in a cache yet, are first copied into pages, which takes 1 KB
a token.

flash_mla is published with two signatures: MetaX's (1.0.1), and a later one by DeepSeek. With the later one, the first
call fills a schedule object. The calls here work with both. vLLM-metax has used the later one since May 2026.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import KernelDeclined
from dlinfer.vendor.maca import refusing, sdk, sequences

KEYS, VALUES = 576, 512
"""The size of a latent key, and the size of its first part, which is the value."""
PAGE = 64
"""Slots in a page, as in vLLM-metax and in DeepSeek's flash_mla."""
_QUERIES = 128
"""The most queries of a piece (vLLM-metax)."""
_TOGETHER = 1024
"""The most queries in a call, since flash_mla keeps two float32 results of each query while it works."""
_ALIGNED = 8
"""The number of 16-bit elements that one read loads."""


def fits(keys: Tensor, values: Tensor) -> bool:
    """Return whether keys and values have the sizes of a latent cache. They may be new tokens, or caches in pages."""
    return (keys.shape[-2], keys.shape[-1], values.shape[-1]) == (1, KEYS, VALUES)


def refuses(call: Any) -> str | None:
    """Return a reason to refuse a call over a latent cache; None if it is served."""
    if not sdk.has_flash_mla():
        return "flash_mla, which computes latent attention, is not installed"
    if call.window_left >= 0 or getattr(call, "window_right", -1) >= 0 or call.logit_softcapping > 0:
        return "flash_mla does not support a window or logit_softcapping"
    if (call.alibi_slopes, call.sinks) != (None, None):
        return "flash_mla does not support alibi_slopes or sinks"
    return refusing.floating(call.q, refusing.HALVES)


def refuses_pages(call: Any) -> str | None:
    """Return a reason to refuse a call over a latent cache in pages; None if it is served."""
    *blocks, _, side = call.k_cache.stride()
    if side != 1 or any(place % _ALIGNED for place in (*blocks, call.k_cache.storage_offset())):
        return "the slots of a latent cache are not contiguous, or are misaligned"
    if call.block_size != PAGE:
        return f"flash_mla needs blocks of {PAGE} slots, not {call.block_size}"
    return refuses(call)


def begins(keys: Tensor, values: Tensor) -> bool:
    """Return whether values are the first part of the keys, in the same memory."""
    return values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()


def pages(k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Return the cache for flash_mla. Raises KernelDeclined unless values are the first part of the keys."""
    if not begins(k_cache, v_cache):
        raise KernelDeclined(reason="flash_mla reads values from k_cache, but v_cache is other memory")
    return k_cache


def decode(q: Tensor, pages: Tensor, table: Tensor, kv_seqlens: Tensor, out: Tensor, scale: float) -> None:
    """Write the attention of one query a sequence into out [sequences, heads, 512]. q: [sequences, heads, 576].

    If kv_seqlens is on the card, each call computes flash_mla's schedule from it, since the replays of a captured graph
    have other lengths. Otherwise the layers of a step share one schedule.
    """
    heads = q.shape[1]
    if kv_seqlens.device == q.device:
        lengths = sequences.of_sequences(kv_seqlens, q.device)
        schedule = sdk.flash_mla().get_mla_metadata(lengths, heads, 1)
    else:
        lengths, schedule = _scheduled(tuple(kv_seqlens.tolist()), 1, heads, True, q.device)
    out.copy_(_call(q.unsqueeze(1), pages, table, lengths, schedule, scale, True).squeeze(1))


def attend_to_tokens(
    q: Tensor, k: Tensor, v: Tensor, new: list[int], keys: list[int], out: Tensor, scale: float, causal: bool
) -> None:
    """Write the attention of prompts to their own tokens, k [tokens, 1, 576] and v [tokens, 1, 512], into out.

    new: each sequence's number of queries. keys: each sequence's number of keys. Raises KernelDeclined unless v equals
    the first part of k. LMDeploy passes k and v in separate memory, so this compares their values and waits for the
    card.
    """
    if not begins(k, v) and not torch.equal(k[..., :VALUES], v):
        raise KernelDeclined(reason="flash_mla reads values from the keys, but v is not the first part of k")
    if sum(keys):
        attend_to_pages(q, *_in_pages(k, keys), new, keys, out, scale, causal)
    else:  # queries without keys give zeros
        out[: sum(new)] = 0


def _in_pages(k: Tensor, keys: list[int]) -> tuple[Tensor, Tensor]:
    """Copy all sequences' keys, k [tokens, 1, 576], into pages. Return the pages and the sequences' block table."""
    counts = [-(-length // PAGE) for length in keys]
    pages = k.new_zeros(sum(counts), PAGE, 1, KEYS)
    slots, table, page, start = pages.view(-1, 1, KEYS), [], 0, 0
    for count, length in zip(counts, keys, strict=True):
        slots[page * PAGE : page * PAGE + length] = k[start : start + length]
        table += [*range(page, page + count), *[0] * (max(counts) - count)]
        page, start = page + count, start + length
    return pages, sequences.on_card(tuple(table), k.device).view(len(keys), -1)


@dataclass(frozen=True)
class _Piece:
    """Consecutive queries of a sequence. first: the first query's row in q. keys: how many keys the last query sees."""

    first: int
    sequence: int
    keys: int


def attend_to_pages(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    new: list[int],
    keys: list[int],
    out: Tensor,
    scale: float,
    causal: bool,
) -> None:
    """Write the attention of prompts to pages into out.

    new: each sequence's number of queries. keys: each sequence's number of keys.
    """
    heads = q.shape[1]
    for size, pieces in _calls(new, keys, causal):
        lengths, schedule = _scheduled(tuple(piece.keys for piece in pieces), size, heads, causal, q.device)
        rows = sequences.on_card(tuple(piece.sequence for piece in pieces), q.device)
        queries = torch.stack([q[piece.first : piece.first + size] for piece in pieces])
        results = _call(queries, pages, table[rows], lengths, schedule, scale, causal)
        for piece, result in zip(pieces, results, strict=True):
            out[piece.first : piece.first + size] = result


def _calls(new: list[int], keys: list[int], causal: bool) -> Iterator[tuple[int, list[_Piece]]]:
    """Cut prompts into pieces. Yield two values for each call of flash_mla.

    The first is how many queries each of the call's pieces has, the second is the call's pieces.
    """
    by_size: dict[int, list[_Piece]] = {}
    start = 0
    for sequence, (count, length) in enumerate(zip(new, keys, strict=True)):
        for first in range(0, count, _QUERIES):
            end = min(first + _QUERIES, count)
            seen = max(length - (count - end), 0) if causal else length
            by_size.setdefault(end - first, []).append(_Piece(start + first, sequence, seen))
        start += count
    for size, pieces in by_size.items():
        most = max(_TOGETHER // size, 1)
        for place in range(0, len(pieces), most):
            yield size, pieces[place : place + most]


@lru_cache(maxsize=64)
def _scheduled(
    lengths: tuple[int, ...], queries: int, heads: int, causal: bool, device: torch.device
) -> tuple[Tensor, Any]:
    """Return the lengths on the card, and flash_mla's schedule for them, cached for the other layers of a step.

    DeepSeek's flash_mla demands that all uses of a schedule have the same ``causal``. So ``causal`` is part of the
    cache's key.
    """
    on_card = sequences.on_card(lengths, device)
    return on_card, sdk.flash_mla().get_mla_metadata(on_card, queries * heads, 1)


def _call(
    q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, schedule: Any, scale: float, causal: bool
) -> Tensor:
    """Call flash_mla. q: [sequences, queries, heads, 576]. Returns [sequences, queries, heads, 512]."""
    out, _ = sdk.flash_mla().flash_mla_with_kvcache(
        q=q
        if q.is_contiguous() and q.data_ptr() % 16 == 0
        else q.clone(memory_format=torch.contiguous_format),
        k_cache=pages,
        block_table=table.to(torch.int32).contiguous(),
        cache_seqlens=lengths,
        head_dim_v=VALUES,
        tile_scheduler_metadata=schedule[0],
        num_splits=schedule[1],
        softmax_scale=scale,
        causal=causal,
    )
    return out
