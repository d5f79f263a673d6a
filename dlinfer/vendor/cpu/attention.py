"""The attention ops on CPU: prefill one sequence at a time, decode in one call for the whole batch."""

import torch
from torch import Tensor

from dlinfer.vendor.cpu.sdpa import Extras, attend, flash


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
    extras = _extras_of_sequence(softmax_scale, logit_softcapping, alibi_slopes, sinks)
    bounds = _bounds(causal, window_left, window_right)
    start = kv_start = 0
    for end, kv_len in zip(q_ends.tolist(), kv_seqlens.tolist(), strict=True):
        kv_end = kv_start + kv_len
        keys, values = k[kv_start:kv_end], v[kv_start:kv_end]
        attn_output[start:end] = _attend_sequence(q[start:end], keys, values, bounds, extras)
        start, kv_start = end, kv_end


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
    extras = _extras_of_sequence(softmax_scale, logit_softcapping, alibi_slopes, sinks)
    bounds = _bounds(causal, window_left, window_right)
    start = 0
    for index, (end, kv_len) in enumerate(zip(q_ends.tolist(), kv_seqlens.tolist(), strict=True)):
        oldest = max(0, kv_len - (end - start) - window_left) if window_left >= 0 else 0
        first = oldest // block_size  # blocks before it are out of every query's window
        blocks = block_offsets[index, first : -(-kv_len // block_size)]
        keys, values = (
            cache.index_select(0, blocks).flatten(0, 1)[: kv_len - first * block_size]
            for cache in (k_cache, v_cache)
        )
        attn_output[start:end] = _attend_sequence(q[start:end], keys, values, bounds, extras)
        start = end


def _extras_of_sequence(scale: float, softcap: float, slopes: Tensor | None, sinks: Tensor | None) -> Extras:
    return Extras(
        scale,
        softcap,
        None if slopes is None else slopes[:, None, None],
        None if sinks is None else sinks[:, None],
    )


def _bounds(causal: bool, window_left: int, window_right: int) -> tuple[int | None, int | None]:
    """(lowest, highest) visible key position - query position; None is no bound."""
    highest = window_right if window_right >= 0 else None
    if causal:
        highest = 0
    return -window_left if window_left >= 0 else None, highest


def _attend_sequence(
    q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int | None, int | None], extras: Extras
) -> Tensor:
    """q: [q_len, q_heads, size], k, v: the last kv_len tokens [kv_len, kv_heads, size]. Returns a new tensor
    [q_len, q_heads, size of v]."""
    q_len, kv_len = q.shape[0], k.shape[0]
    if not q_len or not kv_len:
        return q.new_zeros(q_len, q.shape[1], v.shape[2])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    lowest, highest = bounds
    if lowest is not None and lowest <= 1 - kv_len:
        lowest = None
    if bounds[1] == 0 and lowest is None and q_len == kv_len and extras.slopes is None and not extras.softcap:
        return flash(q, k, v, None, True, extras)[0].transpose(0, 1)
    distance = torch.arange(kv_len) - torch.arange(kv_len - q_len, kv_len)[:, None]
    hidden = None
    if highest is not None:
        hidden = distance > highest
    if lowest is not None:
        hidden = distance < lowest if hidden is None else hidden | (distance < lowest)
    shown = None if hidden is None else hidden[None, None]
    return attend(q, k, v, distance[None, None], shown, extras)[0].transpose(0, 1)


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
    if not q.shape[0]:
        return
    group = num_q_heads // num_kv_heads
    extras = Extras(
        softmax_scale,
        logit_softcapping,
        None if alibi_slopes is None else alibi_slopes.view(num_kv_heads, group, 1),
        None if sinks is None else sinks.view(num_kv_heads, group),
    )
    blocks, distance = _decode_blocks(block_offsets, kv_seqlens.long(), block_size, window_left)
    if not distance.shape[1]:
        attn_output.zero_()
        return
    hidden = distance > 0
    unwritten = hidden.view(-1).nonzero().squeeze(1)
    keys, values = (_gather(cache, blocks, q.shape[0], unwritten) for cache in (k_cache, v_cache))
    if window_left >= 0:
        hidden |= distance < -window_left
    shown = hidden[:, None, None] if window_left >= 0 or unwritten.numel() else None
    queries = q.unflatten(1, (num_kv_heads, group))  # a group's heads are the queries of its key head
    out = attend(queries, keys, values, distance[:, None, None], shown, extras)
    attn_output.copy_(out.flatten(1, 2))


def _decode_blocks(
    block_offsets: Tensor, lengths: Tensor, block_size: int, window_left: int
) -> tuple[Tensor, Tensor]:
    """The blocks to read, [sequences * columns], and key position - query position, [sequences, columns *
    block_size].

    All sequences read as many blocks as the longest needs; where one has no more, block 0 stands in.
    """
    lengths = lengths[:, None]
    used = (lengths + (block_size - 1)) // block_size
    if window_left < 0:
        columns = int(used.max())
        column = torch.arange(columns)
        blocks = block_offsets[:, :columns]
        position = torch.arange(columns * block_size)
    else:
        first = (lengths - 1 - window_left).clamp_(min=0) // block_size
        columns = int((used - first).max())
        column = first + torch.arange(columns)
        blocks = block_offsets.gather(1, column.clamp(max=block_offsets.shape[1] - 1))
        position = first * block_size + torch.arange(columns * block_size)
    return blocks.where(column < used, 0).view(-1), position - (lengths - 1)


def _gather(cache: Tensor, blocks: Tensor, batch: int, unwritten: Tensor) -> Tensor:
    """A copy of the blocks as [batch, kv_heads, keys, size], finite in unwritten slots.

    Those may hold anything, and even a weight of zero does not stop a NaN.
    """
    copy = cache.index_select(0, blocks)
    if unwritten.numel():
        copy.view(-1, cache.shape[2] * cache.shape[3]).index_fill_(0, unwritten, 0)
    return copy.view(batch, -1, cache.shape[2], cache.shape[3]).transpose(1, 2)
