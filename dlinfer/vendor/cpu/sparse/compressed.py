"""DeepSeek-V4's compressed attention on CPU: all sequences that decode in one product, prompts in pieces of queries."""

import torch
from torch import Tensor

from dlinfer import ops
from dlinfer.ops.attention.kv_cache import canonical
from dlinfer.ops.attention.sparse import chosen_positions
from dlinfer.ops.core.checks import ints
from dlinfer.ops.recurrent.sequence_states import check_numbers

_SCORES = 1 << 23  # the most scores of a piece: 32 MiB of float32
_PIECE = 128  # the most queries of a piece; a piece computes scores of twice as many keys of the window


def compress_windows(
    x: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    state: Tensor,
    state_ids: Tensor,
    q_ends: Tensor,
    past_lengths: Tensor,
    out: Tensor,
) -> None:
    ends = check_numbers(ops.compress_windows.rules, state.shape[0], state_ids, q_ends, x.shape[0])
    out.zero_()
    if not x.shape[0]:
        return
    length, size, rows = position_bias.shape[0], out.shape[1], state.shape[2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    sequence, positions = _positions(ends, past_lengths.long())
    past, slots = past_lengths.long()[sequence], state_ids.long()[sequence]
    values = x.to(dtype)
    scores = gate.to(dtype) + position_bias.to(dtype)[positions % length]
    last = ((positions + 1) % length == 0).nonzero()[:, 0]
    if len(last):
        back = torch.arange(1 - length, 1)
        parts = [_gathered(values, scores, state, last, back, positions, past, slots, slice(-size, None))]
        if values.shape[1] > size:
            of_earlier = (last, back - length, positions, past, slots, slice(size))
            parts.insert(0, _gathered(values, scores, state, *of_earlier))
        mixed, weights = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        out[last] = (mixed * weights.softmax(1)).sum(1).to(out.dtype)
    lengths = torch.tensor(ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
    newest = (positions >= (past + lengths[sequence] - rows)) & (slots >= 0)
    kept = newest.nonzero()[:, 0]
    slot, row = slots[kept], positions[kept] % rows
    state[slot, 0, row] = values[kept].to(state.dtype)
    state[slot, 1, row] = scores[kept].to(state.dtype)


def _positions(ends: list[int], past: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each token the number of its sequence, and its position in it."""
    behind = torch.tensor(ends)
    lengths = behind.diff(prepend=behind.new_zeros(1))
    sequence = torch.repeat_interleave(lengths, output_size=ends[-1])
    return sequence, torch.arange(ends[-1]) + (past + lengths - behind)[sequence]


def _gathered(
    values: Tensor,
    scores: Tensor,
    state: Tensor,
    last: Tensor,
    back: Tensor,
    positions: Tensor,
    past: Tensor,
    slots: Tensor,
    columns: slice,
) -> tuple[Tensor, Tensor]:
    """Return values and scores of the tokens ``last + back``: [last, back, columns]. Earlier ones are in ``state``.

    Tokens before the sequence's first one have scores of -inf.
    """
    at = positions[last, None] + back
    rows = (last[:, None] + back).clamp(min=0)
    parts = values[rows, columns], scores[rows, columns]
    earlier = (at < past[last, None]) & (at >= 0)
    if bool(earlier.any()):
        slot = slots[last, None].expand_as(at)[earlier]
        known = state[slot.clamp(min=0), :, at[earlier] % state.shape[2]][..., columns].to(values.dtype)
        known = known.masked_fill((slot < 0)[:, None, None], 0)
        for part, own in zip(parts, known.unbind(1), strict=True):
            part[earlier] = own
    parts[0].masked_fill_((at < 0)[..., None], 0)
    parts[1].masked_fill_((at < 0)[..., None], -torch.inf)
    return parts


def compressed_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    q_ends: Tensor,
    kv_seqlens: Tensor,
    block_table: Tensor,
    ratio: int,
    count: int,
) -> Tensor:
    sequences = (q_ends, kv_seqlens, block_table)
    return chosen_positions(query, key, weights, *sequences, count, ratio, ops.compressed_indexer.rules)


def compressed_attention(
    query: Tensor,
    kv: Tensor,
    sinks: Tensor,
    window_state: Tensor,
    state_ids: Tensor,
    q_ends: Tensor,
    kv_seqlens: Tensor,
    compressed: Tensor | None,
    block_table: Tensor,
    chosen: Tensor | None,
    ratio: int,
    scale: float,
    out: Tensor,
) -> None:
    rules = ops.compressed_attention.rules
    ends = check_numbers(rules, window_state.shape[0], state_ids, q_ends, query.shape[0])
    if not query.shape[0]:
        return
    cache = None if compressed is None else canonical(compressed)
    slots, lengths = ints(state_ids), ints(kv_seqlens)
    starts = [0, *ends[:-1]]
    single = [
        row
        for row, (start, end, slot) in enumerate(zip(starts, ends, slots, strict=True))
        if end == start + 1 and slot >= 0
    ]
    if single:
        rows = torch.tensor(single)
        tokens = torch.tensor([starts[row] for row in single])
        where = state_ids.long()[rows], kv_seqlens.long()[rows].to(query.device)
        entries = None if cache is None else (cache, block_table[rows].long(), ratio)
        own = None if chosen is None else chosen[tokens, 0].long()
        out[tokens] = _decoded(query[tokens], kv[tokens], sinks, window_state, *where, entries, own, scale)
    others = set(range(len(ends))) - set(single)
    for row in sorted(others):
        start, end, length = starts[row], ends[row], lengths[row]
        if end == start:
            continue
        entries = query.new_empty(0, kv.shape[1])
        if cache is not None:
            needed = -(-(length // ratio) // cache.shape[1])
            entries = cache[block_table[row, :needed].long()].flatten(0, 1)[: length // ratio, 0]
        some = slice(start, end)
        own = None if chosen is None else chosen[some, 0].long()
        state = None if slots[row] < 0 else window_state[slots[row]]
        size = window_state.shape[1]
        result = _of_prompt(query[some], kv[some], sinks, state, size, length, entries, own, ratio, scale)
        out[some] = result


def _decoded(
    query: Tensor,
    kv: Tensor,
    sinks: Tensor,
    window_state: Tensor,
    slots: Tensor,
    lengths: Tensor,
    entries: tuple[Tensor, Tensor, int] | None,
    chosen: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the attention of sequences with one new token each, and write their keys into their windows.

    entries: the cache of entries, the sequences' blocks in it, and how many tokens an entry stands for.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    window = window_state.shape[1]
    window_state[slots, (lengths - 1) % window] = kv
    hidden = torch.arange(window) >= lengths[:, None]
    parts = [window_state[slots]]  # the order of keys does not matter
    if entries is not None:
        cache, table, ratio = entries
        visible = (lengths // ratio)[:, None]
        if chosen is None:
            chosen = torch.arange(int(visible.max())).expand(len(lengths), -1)
        unseen = (chosen < 0) | (chosen >= visible)
        places, size = chosen.masked_fill(unseen, 0), cache.shape[1]
        parts.append(cache[table.gather(1, places // size), places % size, 0])
        hidden = torch.cat((hidden, unseen), dim=1)
    keys = torch.empty(*hidden.shape, query.shape[2], dtype=dtype)
    for own, part in zip(keys.split([part.shape[1] for part in parts], dim=1), parts, strict=True):
        own.copy_(part)
    if bool(hidden.any()):
        keys.masked_fill_(hidden[..., None], 0)  # a slot may hold NaN
    scores = (query.to(dtype) * scale) @ keys.transpose(1, 2)
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    sink = sinks.to(dtype)[:, None].expand(len(query), -1, -1)
    weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    return (weights @ keys).to(query.dtype)


def _of_prompt(
    query: Tensor,
    kv: Tensor,
    sinks: Tensor,
    state: Tensor | None,
    window: int,
    length: int,
    entries: Tensor,
    chosen: Tensor | None,
    ratio: int,
    scale: float,
) -> Tensor:
    """Return the attention of the last tokens of one sequence, and write their keys into its window.

    state: the sequence's window, or None if it has no slot. length: of the sequence. entries: all its entries.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    tokens, heads = query.shape[:2]
    past = length - tokens
    first = past if state is None else max(0, past - window)
    keys = kv.to(dtype)
    if state is not None:
        keys = torch.cat((state[torch.arange(first, past) % window].to(dtype), keys))
    entries = entries.to(dtype)
    out = torch.empty_like(query)
    budget = _SCORES // (heads * (window + _PIECE + len(entries)))
    piece = max(1, min(_PIECE, budget))
    sink = sinks.to(dtype)[:, None]
    for start in range(0, tokens, piece):
        end = min(start + piece, tokens)
        own = torch.arange(past + start, past + end)
        before = max(first, past + start + 1 - window)
        visible = (past + end) // ratio if len(entries) else 0
        near = torch.arange(before, past + end)
        far = torch.arange(visible)
        seen = torch.cat((keys[before - first : past + end - first], entries[:visible]))
        hidden_far = far >= ((own + 1) // ratio)[:, None]
        if chosen is not None and visible:
            some = chosen[start:end]
            outside = (some < 0) | (some >= visible)
            is_chosen = torch.zeros(end - start, visible + 1, dtype=torch.bool)
            is_chosen.scatter_(1, some.masked_fill(outside, visible), True)
            hidden_far |= ~is_chosen[:, :visible]
        hidden = torch.cat(((near > own[:, None]) | (near <= own[:, None] - window), hidden_far), dim=1)
        rows = query[start:end].to(dtype).mul(scale).flatten(0, 1)
        scores = (rows @ seen.t()).unflatten(0, (end - start, heads))
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        weights = torch.cat((scores, sink.expand(end - start, -1, -1)), dim=-1).softmax(-1)[..., :-1]
        out[start:end] = (weights.flatten(0, 1) @ seen).unflatten(0, (end - start, heads)).to(query.dtype)
    if state is not None:
        newest = torch.arange(max(past, length - window), length)
        state[newest % window] = kv[newest - past]
    return out
