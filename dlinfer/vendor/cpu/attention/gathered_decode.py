"""Decode attention by torch, for quantised caches and wherever the C++ kernel cannot be used.

The keys and values of the batch are copied out of their pages and padded to the longest sequence. Then one call of
torch's attention serves the whole batch. If padding would more than double the keys that are read, the batch is split
into groups of sequences, with one call for each group. The lengths in a group differ by less than a factor of two."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dlinfer.vendor.cpu.attention.kv_cache import Pages
from dlinfer.vendor.cpu.attention.sdpa import Extras, attend


def gathered_decode(
    q: Tensor,
    caches: tuple[Pages, Pages],
    block_offsets: Tensor,
    kv_seqlens: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    attn_output: Tensor,
    softmax_scale: float,
    window_left: int,
    logit_softcapping: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Compute the op ``paged_decode_attention``. caches: (pages of the keys, pages of the values)."""
    if not q.shape[0]:
        return
    block_size = caches[0].block_size
    group = num_q_heads // num_kv_heads
    extras = Extras(
        softmax_scale,
        logit_softcapping,
        None if alibi_slopes is None else alibi_slopes.view(num_kv_heads, group, 1),
        None if sinks is None else sinks.view(num_kv_heads, group),
    )
    lengths = kv_seqlens.long()
    first = torch.zeros_like(lengths)
    if window_left >= 0:
        first = (lengths - 1 - window_left).clamp_(min=0) // block_size
    batch = _Batch(q.unflatten(1, (num_kv_heads, group)), block_offsets, lengths, first)
    count = (lengths + (block_size - 1)) // block_size - first
    for rows, columns in _groups(count):
        some = batch if rows is None else _Batch(*(x.index_select(0, rows) for x in batch))
        out = _attend(some, columns, caches, window_left, extras).flatten(1, 2)
        if rows is None:
            attn_output.copy_(out)
        else:
            attn_output.index_copy_(0, rows, out)


class _Batch(NamedTuple):
    """The decode queries of some sequences.

    lengths: each sequence's number of keys. first: for each sequence, the index of the first block to read.
    """

    queries: Tensor  # [batch, kv_heads, group, size]
    block_offsets: Tensor  # [batch, max_blocks]
    lengths: Tensor  # [batch]
    first: Tensor  # [batch]


def _groups(count: Tensor) -> Iterator[tuple[Tensor | None, int]]:
    """Split a batch into groups of sequences that read about the same number of blocks; yield pairs (rows, columns).

    count: how many blocks each sequence reads. rows: the group's rows in the batch; None means all. columns: how many
        blocks to copy for each sequence of the group.
    """
    longest = int(count.max())
    if count.shape[0] == 1 or count.shape[0] * longest <= 2 * int(count.sum()):
        yield None, longest
        return
    while longest:
        shorter = longest // 2 if longest > 1 else -1  # the last group includes empty sequences
        rows = ((count <= longest) & (count > shorter)).nonzero().squeeze(1)
        if rows.numel():
            yield rows, longest
        longest //= 2


def _attend(
    batch: _Batch, columns: int, caches: tuple[Pages, Pages], window_left: int, extras: Extras
) -> Tensor:
    """Return the attention over ``columns`` blocks of each sequence, from the block ``batch.first`` on.

    The result is [batch, kv_heads, group, size of v].
    """
    queries, block_offsets, lengths, first = batch
    if not columns:
        return queries.new_zeros(*queries.shape[:3], caches[1].size)
    block_size, lengths, first = caches[0].block_size, lengths[:, None], first[:, None]
    column = first + torch.arange(columns)
    owned = column * block_size < lengths
    blocks = block_offsets.gather(1, column.clamp(max=block_offsets.shape[1] - 1)).where(owned, 0).view(-1)
    distance = first * block_size + torch.arange(columns * block_size) - (lengths - 1)
    hidden = distance > 0
    unwritten = hidden.view(-1).nonzero().squeeze(1)
    keys, values = (_gather(cache, blocks, queries, unwritten) for cache in caches)
    if window_left >= 0:
        hidden = hidden.logical_or_(distance < -window_left)
    shown = hidden[:, None, None] if window_left >= 0 or unwritten.numel() else None
    return attend(queries, keys, values, distance[:, None, None], shown, extras)


def _gather(cache: Pages, blocks: Tensor, queries: Tensor, unwritten: Tensor) -> Tensor:
    """Copy the blocks as [batch, kv_heads, keys, size], with zeros in unwritten slots.

    queries: gives the batch size and the dtype.
    unwritten: indices of slots behind a sequence's last key. They may hold NaN, and NaN times an attention weight of
        zero would still be NaN.
    """
    copy = cache.read(blocks, queries.dtype)
    heads, size = copy.shape[2:]
    if unwritten.numel():
        copy.view(-1, heads * size).index_fill_(0, unwritten, 0)
    return copy.view(len(queries), -1, heads, size).transpose(1, 2)
