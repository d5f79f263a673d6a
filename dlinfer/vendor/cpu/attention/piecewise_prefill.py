"""Prefill attention by torch: one sequence at a time, and a long sequence's queries piece by piece.

It serves quantised caches, and all caches if the C++ kernel cannot be used (``prefill.py``). Pieces bound the memory of
masks and scores.
"""

import torch
from torch import Tensor

from dlinfer.ops.attention.semantics import Scoring
from dlinfer.vendor.cpu.attention.kv_cache import Pages
from dlinfer.vendor.cpu.attention.sdpa import Extras, attend, flash

_SCORES_AT_A_TIME = 1 << 24  # bounds masks and scores: 64 MiB in float32
_ROWS_AT_LEAST = 128  # for pieces of a window, which read only their rows' windows


def _extras(scoring: Scoring) -> Extras:
    """Return the options of an attention call, shaped to broadcast over the heads and queries of one sequence."""
    return Extras(
        scoring.softmax_scale,
        scoring.logit_softcapping,
        None if scoring.alibi_slopes is None else scoring.alibi_slopes[:, None, None],
        None if scoring.sinks is None else scoring.sinks[:, None],
    )


def _bounds(scoring: Scoring) -> tuple[int | None, int | None]:
    """Return the lowest and the highest visible ``key position - query position``. None means no bound."""
    highest = 0 if scoring.causal else scoring.window_right if scoring.window_right >= 0 else None
    return -scoring.window_left if scoring.window_left >= 0 else None, highest


def piecewise_prefill(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, kv_seqlens: Tensor, attn_output: Tensor, scoring: Scoring
) -> None:
    """Compute the op ``prefill_attention``, with the scoring options in ``scoring``."""
    bounds, extras = _bounds(scoring), _extras(scoring)
    start = kv_start = 0
    for end, kv_len in zip(q_ends.tolist(), kv_seqlens.tolist(), strict=True):
        kv_end = kv_start + kv_len
        keys, values = k[kv_start:kv_end], v[kv_start:kv_end]
        _attend_sequence(q[start:end], keys, values, bounds, extras, attn_output[start:end])
        start, kv_start = end, kv_end


def piecewise_paged_prefill(
    q: Tensor,
    caches: tuple[Pages, Pages],
    block_offsets: Tensor,
    q_ends: Tensor,
    kv_seqlens: Tensor,
    attn_output: Tensor,
    scoring: Scoring,
) -> None:
    """Compute the op ``paged_prefill_attention``. caches: the pages of the keys, and those of the values."""
    bounds, extras = _bounds(scoring), _extras(scoring)
    block_size = caches[0].block_size
    start = 0
    for index, (end, kv_len) in enumerate(zip(q_ends.tolist(), kv_seqlens.tolist(), strict=True)):
        oldest = 0 if bounds[0] is None else max(0, kv_len - (end - start) + bounds[0])
        first = oldest // block_size  # earlier blocks are outside every window
        blocks = block_offsets[index, first : -(-kv_len // block_size)]
        keys, values = (
            cache.read(blocks, q.dtype).flatten(0, 1)[: kv_len - first * block_size] for cache in caches
        )
        _attend_sequence(q[start:end], keys, values, bounds, extras, attn_output[start:end])
        start = end


def _attend_sequence(
    q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int | None, int | None], extras: Extras, out: Tensor
) -> None:
    """Write the attention of one sequence into out, a piece of its queries at a time.

    q: [q_len, q_heads, size].
    k, v: [kv_len, kv_heads, size]; their last q_len tokens are the queries' own.
    bounds: the result of ``_bounds``.
    out: may be q itself.
    """
    q_len, kv_len = q.shape[0], k.shape[0]
    if not kv_len:
        out.zero_()
        return
    lowest, highest = bounds
    history = kv_len - q_len
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    plain = extras.slopes is None and not extras.softcap
    if plain and highest == 0 and lowest is None and not history:
        out.copy_(flash(queries, keys, values, None, True, extras)[0].transpose(0, 1))
        return
    rows = max(1, _SCORES_AT_A_TIME // (kv_len if plain else kv_len * q.shape[1]))
    if lowest is not None:
        rows = min(rows, max(_ROWS_AT_LEAST, -lowest))
    for first in range(0, q_len, rows):
        last = min(first + rows, q_len)
        begin = 0 if lowest is None else max(0, history + first + lowest)
        end = kv_len if highest is None else min(kv_len, history + last + highest)
        if end <= begin:
            out[first:last].zero_()
            continue
        distance = torch.arange(begin, end) - torch.arange(history + first, history + last)[:, None]
        hidden = None
        if highest is not None:
            hidden = distance > highest
        if lowest is not None:
            too_old = distance < lowest
            hidden = too_old if hidden is None else hidden.logical_or_(too_old)
        piece = attend(
            queries[:, :, first:last],
            keys[:, :, begin:end],
            values[:, :, begin:end],
            distance[None, None],
            None if hidden is None else hidden[None, None],
            extras,
        )
        out[first:last] = piece[0].transpose(0, 1)
