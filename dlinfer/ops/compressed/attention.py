"""DeepSeek-V4's attention: a window of tokens, and keys that each stand for ``ratio`` tokens before it.

Source: DeepSeek-V4 (2026), section 2.3, as transformers' DeepseekV4Attention computes it. ``compress_windows`` makes
the compressed keys. Entry e of a sequence stands for its tokens e * ratio to (e + 1) * ratio - 1. A block of the cache
has ``block_size`` entries, and entry e is in block e // block_size of the sequence. The token at position p sees
entry e if (e + 1) * ratio <= p + 1. The queries of sequence b end before row ``q_ends[b]``, and are its last tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.attention.kv_cache import canonical
from dlinfer.ops.attention.semantics import TOLERANCES
from dlinfer.ops.attention.sparse import chosen_positions
from dlinfer.ops.core.checks import Rules, ints
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.recurrent.sequence_states import check_numbers


@fused_op(tolerances=Tolerance(0, 0, "whole numbers; scores of 16-bit numbers are summed in float32"))
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
    """Choose, for each token, the entries with the highest sum over heads of weight * relu(query . key).

    query: [tokens, heads, size], float32, float16 or bfloat16, any strides.
    key: the indexer's cache of entries in the vendor's layout, with one head of ``size``; dtype of query.
    weights: [tokens, heads], dtype of query.
    q_ends: [sequences], int32 or int64, on any device: the index after each sequence's last query.
    kv_seqlens: [sequences], likewise: the number of tokens of each sequence, queries included.
    block_table: [sequences, blocks], int32 or int64: the cache's blocks of each sequence.
    ratio: how many tokens an entry stands for, 1 or more.
    count: the largest number of entries to choose, 1 or more.

    Returns int32 [tokens, 1, count]: entries of the token's sequence that it sees, in rising order; unused places hold
    -1. Of equal scores the earlier entry is chosen. Nothing is mutated. Scores are computed in float32 at least. Raises
    OpArgumentError.
    """
    sequences = (q_ends, kv_seqlens, block_table)
    return chosen_positions(query, key, weights, *sequences, count, ratio, compressed_indexer.rules)


@fused_op(tolerances=TOLERANCES, mutates=("window_state", "out"))
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
    """The torch op behind ``dlinfer.ops.compressed_attention``, which documents the arguments.

    out: like query; gets the result; it shares no memory with another argument.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    window = window_state.shape[1]
    slots = None if compressed is None else canonical(compressed)
    ends = check_numbers(compressed_attention.rules, window_state.shape[0], state_ids, q_ends, query.shape[0])
    start = 0
    for row, (end, slot, length) in enumerate(zip(ends, ints(state_ids), ints(kv_seqlens), strict=True)):
        past = length - (end - start)
        first = max(0, past - window) if slot >= 0 else past
        known = torch.arange(first, past, device=query.device) % window
        keys = torch.cat((window_state[slot, known], kv[start:end])).to(dtype)
        entries = keys[:0]
        if slots is not None:
            needed = -(-(length // ratio) // slots.shape[1])
            entries = slots[block_table[row, :needed].long()].flatten(0, 1)[:, 0].to(dtype)
        for token in range(start, end):
            own = past + token - start
            seen = keys[max(0, own + 1 - window - first) : own + 1 - first]
            visible = torch.arange((own + 1) // ratio if slots is not None else 0, device=query.device)
            if chosen is not None:
                visible = visible[torch.isin(visible, chosen[token, 0].long())]
            seen = torch.cat((seen, entries[visible]))
            scores = torch.cat((query[token].to(dtype) @ seen.t() * scale, sinks[:, None].to(dtype)), dim=-1)
            out[token] = scores.softmax(-1)[:, :-1] @ seen
        if slot >= 0 and end > start:
            newest = torch.arange(max(first, length - window), length, device=query.device)
            window_state[slot, newest % window] = keys[newest - first].to(window_state.dtype)
        start = end


@compressed_attention.python_call
def _call_compressed_attention(
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
) -> Tensor:
    """Attend to a window of tokens and to compressed entries, with one head of keys that are also the values.

    A token sees the last W tokens of its sequence, its own included, and with ``compressed`` the entries before it. Of
    head h, sinks[h] is one more score in the softmax, without a value.

    query: [tokens, heads, size], float32, float16 or bfloat16, any strides.
    kv: [tokens, size], the tokens' keys, of query's dtype.
    sinks: [heads], any floating dtype.
    window_state: [slots, W, size], of query's dtype, any strides: each sequence's last W keys. The key at position p is
        in row p % W. The tokens' keys are written into it.
    state_ids: [sequences], int32 or int64: the slot of each sequence, no slot twice. A negative id means no slot: no
        earlier token is in the window, and the tokens are not stored.
    q_ends, kv_seqlens: [sequences], int32 or int64, on any device: the index after each sequence's last query, and its
        number of tokens, queries included.
    compressed: the cache of entries in the vendor's layout, with one head of ``size``, of query's dtype; or None.
    block_table: [sequences, blocks], int32 or int64: the cache's blocks of each sequence.
    chosen: [tokens, 1, count], int32 or int64: the entries to attend to, none twice; numbers of entries that the token
        does not see are ignored, and may repeat. None: all entries.
    ratio: how many tokens an entry stands for, 1 or more.
    scale: the factor of the scores, except for the sinks.

    Returns a new tensor of query's shape and dtype; window_state is mutated. Computed in float32 at least and rounded
    once. Raises OpArgumentError, also for ends that decrease or do not end at the number of tokens, and for slots out
    of range.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    sequences = (state_ids, q_ends, kv_seqlens)
    entries = (compressed, block_table, chosen, ratio, scale)
    compressed_attention.overload(query, kv, sinks, window_state, *sequences, *entries, out)
    return out


compressed_indexer.takes(
    query="float [tokens, heads, size]",
    key="cache like query [blocks, block_size, 1, size]",
    weights="like query [tokens, heads]",
    q_ends="int [sequences]",
    kv_seqlens="int [sequences]",
    block_table="int on query [sequences, columns]",
    returns="int32 on query [tokens, 1, count]",
)
compressed_attention.takes(
    query="float [tokens, heads, size]",
    kv="like query [tokens, size]",
    sinks="float on query [heads]",
    window_state="like query [slots, window, size]",
    state_ids="int on query [sequences]",
    q_ends="int [sequences]",
    kv_seqlens="int [sequences]",
    compressed="cache like query [blocks, block_size, 1, size]",
    block_table="int on query [sequences, columns]",
    chosen="int on query [tokens, 1, count]",
    out="like query [*query]",
)


@compressed_indexer.check
def _check_compressed_indexer(rules: Rules, ratio: int, count: int) -> None:
    rules.require(count >= 1, "count", "at least 1", lambda: count)
    _check_ratio(rules, ratio)


@compressed_attention.check
def _check_ratio(rules: Rules, ratio: int) -> None:
    rules.require(ratio >= 1, "ratio", "at least 1", lambda: ratio)


_BATCHES: dict[str, tuple[list[int], list[int], torch.dtype]] = {
    "decoding": ([1, 1, 1], [9, 60, 1], torch.int64),
    "prefill, int32": ([5, 32], [5, 32], torch.int32),
    "continued": ([3, 17], [20, 61], torch.int64),
    "one token": ([1], [1], torch.int64),
    "no tokens": ([], [], torch.int64),
}


def _tables(
    make: SampleMaker, q_lens: list[int], kv_lens: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q_ends, kv_seqlens, block_table) of at most three sequences.

    The cache has 12 blocks of 4 entries. Each sequence gets four of these blocks.
    """
    table = make.permutation(12, dtype)[: 4 * len(q_lens)].view(len(q_lens), 4)
    return torch.tensor(q_lens, dtype=dtype).cumsum(0).to(dtype), torch.tensor(kv_lens, dtype=dtype), table


@compressed_indexer.samples
def _compressed_indexer_samples(make: SampleMaker) -> Iterator[Sample]:
    for name, (q_lens, kv_lens, dtype) in _BATCHES.items():
        tokens = sum(q_lens)
        args = (make.tensor(tokens, 4, 16), make.cache(12, 4, 1, 16), make.tensor(tokens, 4))
        yield Sample(name, (*args, *_tables(make, q_lens, kv_lens, dtype), 4, 5))


@compressed_attention.samples
def _compressed_attention_samples(make: SampleMaker) -> Iterator[Sample]:
    def sample(name: str, window: int, kind: str, ids: list[int] | None = None) -> Sample:
        q_lens, kv_lens, dtype = _BATCHES[name]
        tokens = sum(q_lens)
        ends, lengths, table = _tables(make, q_lens, kv_lens, dtype)
        query, kv = make.tensor(tokens, 4, 16), make.tensor(tokens, 16)
        slots = make.permutation(5)[: len(q_lens)] if ids is None else torch.tensor(ids, device=make.device)
        entries = None if kind == "a window alone" else make.cache(12, 4, 1, 16)
        some = [make.permutation(20)[:6] - 3 for _ in range(tokens)] or [make.permutation(6)]
        chosen = torch.stack(some)[:tokens, None].to(dtype) if kind == "chosen entries" else None
        state = make.tensor(5, window, 16)
        states = (make.tensor(4), state, slots.to(dtype), ends, lengths)
        args = (query, kv, *states, entries, table, chosen, 4, 0.25, make.tensor(tokens, 4, 16))
        return Sample(f"{name}, {kind}, window {window}", args)

    for name in _BATCHES:
        yield sample(name, 8, "chosen entries")
    for name in ("decoding", "continued"):
        yield sample(name, 6, "all entries")
        yield sample(name, 8, "a window alone")
    yield sample("continued", 8, "all entries", [-1, 2])
    yield sample("prefill, int32", 1, "all entries")
