"""DeepSeek's sparse attention (DeepSeek-V3.2, 2025, arXiv:2512.02556): an indexer chooses what each token attends to.

Both ops read paged caches. The queries of sequence b end before row ``actual_seq_lengths_query[b]`` and begin after the
queries of sequence b - 1. These queries are the last tokens of sequence b in the cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.ops.attention.kv_cache import canonical
from dlinfer.ops.attention.semantics import TOLERANCES
from dlinfer.ops.core.checks import Rules, ints
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op

_SCORED = 1 << 22  # the most products held at once, 16 MiB of float32; one query may need more

_EXACT = Tolerance(0, 0, "whole numbers; scores of 16-bit numbers are summed in float32")


@fused_op(tolerances=_EXACT)
def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    sparse_count: int,
) -> Tensor:
    """Choose, for each token, the positions with the highest sum over heads of weight * relu(query . key).

    query: [tokens, heads, size], float32, float16 or bfloat16, any strides.
    key: the indexer's cache in the vendor's layout, with one head of ``size``; dtype of query.
    weights: [tokens, heads], dtype of query.
    actual_seq_lengths_query: [sequences], int32 or int64, on any device: the index after each sequence's last query.
    actual_seq_lengths_key: [sequences], likewise: the number of tokens of each sequence in the cache, queries included.
    block_table: [sequences, blocks], int32 or int64: the cache's blocks of each sequence.
    sparse_count: the largest number of positions to choose, 1 or more.

    Returns int32 [tokens, 1, sparse_count]: positions in the token's sequence, none after the query's own, in rising
    order; unused places hold -1. Of equal scores the earlier position is chosen. Nothing is mutated. Scores are
    computed in float32 at least. Raises OpArgumentError.
    """
    return chosen_positions(
        query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key, block_table, sparse_count
    )


def chosen_positions(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    q_ends: Tensor,
    kv_seqlens: Tensor,
    block_table: Tensor,
    sparse_count: int,
    ratio: int = 1,
    rules: Rules | None = None,
) -> Tensor:
    """Return the result of ``lightning_indexer``, computed for a few queries of one sequence at a time.

    The products of a long prompt are heads * tokens^2 numbers, too many to hold in memory at once.

    ratio: how many tokens each key stands for; see ``compressed_indexer``. rules: of the op, for errors.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    slots = canonical(key)
    out = torch.full((query.shape[0], 1, sparse_count), -1, dtype=torch.int32, device=query.device)
    for start, end, tokens, blocks in sequences_of(
        rules or lightning_indexer.rules, query, q_ends, kv_seqlens, block_table, slots, ratio
    ):
        length = tokens // ratio
        if not length:
            continue
        keys = slots[blocks].flatten(0, 1)[:length, 0].to(dtype)
        count = min(sparse_count, length)
        step = max(1, _SCORED // (query.shape[1] * length))
        for first in range(start, end, step):
            last = min(first + step, end)
            some = slice(first, last)
            products = functional.relu(query[some].to(dtype) @ keys.t())  # [queries, heads, length]
            scores = (products * weights[some, :, None].to(dtype)).sum(1)
            own = torch.arange(tokens - (end - first), tokens - (end - last), device=query.device)
            own = (own + 1) // ratio - 1  # the last key that the token sees
            hidden = torch.arange(length, device=query.device) > own[:, None]
            order = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
            best = order[:, :count]
            rising = best.masked_fill(best > own[:, None], length).sort(dim=-1).values
            out[some, 0, :count] = rising.masked_fill(rising == length, -1).int()
    return out


def sequences_of(
    rules: Rules,
    query: Tensor,
    q_ends: Tensor,
    kv_seqlens: Tensor,
    block_table: Tensor,
    slots: Tensor,
    ratio: int = 1,
) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yield (first query, index after the last query, number of tokens, block ids) of each sequence with queries.

    ratio: how many tokens each slot of the cache stands for.
    """
    ends, lengths, start = ints(q_ends), ints(kv_seqlens), 0
    rules.require(
        (ends[-1] if ends else 0) == query.shape[0],
        "actual_seq_lengths_query",
        lambda: f"ends whose last one is {query.shape[0]}, the number of tokens",
        lambda: ends,
    )
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        if end > start:
            needed = -(-(length // ratio) // slots.shape[1])
            yield start, end, length, block_table[row, :needed].long()
        start = end


@fused_op(tolerances=TOLERANCES)
def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale: float,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    kv_seqlens: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
) -> Tensor:
    """Compute latent attention to chosen positions: softmax(scale * (query . key + query_rope . key_rope)) times value.

    query: [tokens, heads, size], float32, float16 or bfloat16, any strides. query_rope: [tokens, heads, rope size].
    key, value, key_rope: caches in the vendor's layout, each with one head, of query's dtype. Their last sizes are
        ``size``, the result's size and the rope size. key and value may be one tensor.
    sparse_indices: [tokens, 1, count], int32 or int64: positions in the token's sequence. Negative positions, and
        positions after the query's own, are ignored.
    scale: the factor of the scores.
    block_table: [sequences, blocks], int32 or int64.
    actual_seq_lengths_query, kv_seqlens: [sequences], int32 or int64, on any device: the index after each sequence's
        last query, and its number of tokens in the cache.

    Returns a new tensor [tokens, heads, size of value] of query's dtype; a token that sees nothing gets zeros. Nothing
    is mutated. Computed in float32 at least and rounded once. Raises OpArgumentError.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys, values, turned = canonical(key), canonical(value), canonical(key_rope)
    out = query.new_zeros(*query.shape[:2], values.shape[3])
    for start, end, length, blocks in sequences_of(
        sparse_flash_attention.rules, query, actual_seq_lengths_query, kv_seqlens, block_table, keys
    ):
        k, v, r = (x[blocks].flatten(0, 1)[:length, 0].to(dtype) for x in (keys, values, turned))
        for token in range(start, end):
            own = length - (end - token)
            chosen = sparse_indices[token, 0]
            places = chosen[(chosen >= 0) & (chosen <= own)].long()
            scores = query[token].to(dtype) @ k[places].t() + query_rope[token].to(dtype) @ r[places].t()
            if len(places):
                out[token] = (scores * scale).softmax(-1) @ v[places]
    return out


lightning_indexer.takes(
    query="float [tokens, heads, size]",
    key="cache like query [blocks, block_size, 1, size]",
    weights="like query [tokens, heads]",
    actual_seq_lengths_query="int [sequences]",
    actual_seq_lengths_key="int [sequences]",
    block_table="int on query [sequences, columns]",
    returns="int32 on query [tokens, 1, sparse_count]",
)


@lightning_indexer.check
def _check_lightning_indexer(rules: Rules, sparse_count: int) -> None:
    rules.require(sparse_count >= 1, "sparse_count", "at least 1", lambda: sparse_count)


sparse_flash_attention.takes(
    query="float [tokens, heads, size]",
    key="cache like query [blocks, block_size, 1, size]",
    value="cache like query [blocks, block_size, 1, value_size]",
    sparse_indices="int on query [tokens, 1, count]",
    block_table="int on query [sequences, columns]",
    actual_seq_lengths_query="int [sequences]",
    kv_seqlens="int [sequences]",
    query_rope="like query [tokens, heads, rope_size]",
    key_rope="cache like query [blocks, block_size, 1, rope_size]",
    returns="like query [tokens, heads, value_size]",
)


def _tables(
    make: SampleMaker, q_lens: list[int], kv_lens: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q_ends, kv_seqlens, block_table) of at most three sequences.

    The cache has 12 blocks of 8 tokens. Each sequence gets four of these blocks.
    """
    table = make.permutation(12, dtype)[: 4 * len(q_lens)].view(len(q_lens), 4)
    return torch.tensor(q_lens, dtype=dtype).cumsum(0).to(dtype), torch.tensor(kv_lens, dtype=dtype), table


_BATCHES: dict[str, tuple[list[int], list[int], torch.dtype]] = {
    "decoding": ([1, 1, 1], [9, 32, 1], torch.int64),
    "prefill, int32": ([5, 12], [5, 12], torch.int32),
    "continued": ([3, 7], [20, 31], torch.int64),
    "one token": ([1], [1], torch.int64),
    "no tokens": ([], [], torch.int64),
}


@lightning_indexer.samples
def _lightning_indexer_samples(make: SampleMaker) -> Iterator[Sample]:
    for name, (q_lens, kv_lens, dtype) in _BATCHES.items():
        tokens = sum(q_lens)
        ends, lengths, table = _tables(make, q_lens, kv_lens, dtype)
        args = (make.tensor(tokens, 4, 16), make.cache(12, 8, 1, 16), make.tensor(tokens, 4))
        yield Sample(name, (*args, ends, lengths, table, 6))


@sparse_flash_attention.samples
def _sparse_flash_attention_samples(make: SampleMaker) -> Iterator[Sample]:
    for name, (q_lens, kv_lens, dtype) in _BATCHES.items():
        tokens = sum(q_lens)
        ends, lengths, table = _tables(make, q_lens, kv_lens, dtype)
        latent, turned = make.cache(12, 8, 1, 16), make.cache(12, 8, 1, 8)
        chosen = torch.stack([make.permutation(36)[:6] - 4 for _ in range(tokens)] or [make.permutation(6)])
        places = chosen[:tokens, None].to(dtype)
        yield Sample(
            name,
            (
                make.tensor(tokens, 4, 16),
                latent,
                latent.clone(),
                places,
                24**-0.5,
                table,
                ends,
                lengths,
                make.tensor(tokens, 4, 8),
                turned,
            ),
        )
