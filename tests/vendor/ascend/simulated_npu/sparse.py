"""The lightning indexer and attention to chosen positions, in layouts TND and PA_BSND."""

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import HALVES, require

_FAR = (1 << 63) - 1
_COUNTS = (*range(1, 2049), 3072, 4096, 5120, 6144, 7168, 8192)


def _sequences(
    query: Tensor, cache: Tensor, ends: Tensor | None, lengths: Tensor | None, table: Tensor | None
):
    """(first query, the one behind the last, length, blocks) of each sequence."""
    require(ends is not None and lengths is not None and table is not None, "lengths and a block table")
    assert ends is not None and lengths is not None and table is not None
    for name, x in (("actual_seq_lengths_query", ends), ("actual_seq_lengths_kv", lengths)):
        rules.tensor(name, x, (torch.int32,), 1)
        rules.shape(name, x, (table.shape[0],))
    rules.tensor("block_table", table, (torch.int32,), 2)
    require(
        ends.tolist() == sorted(ends.tolist()) and int(ends[-1]) == query.shape[0],
        "rising ends, the last of all tokens",
    )
    start = 0
    for row, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        blocks = table[row, : -(-length // cache.shape[1])].long()
        require(
            -(-length // cache.shape[1]) <= table.shape[1], "block_table: a block for each part of a sequence"
        )
        rules.within("block_table", blocks, 0, cache.shape[0] - 1)
        yield start, end, length, blocks
        start = end


def _far(pre_tokens: int, next_tokens: int) -> None:
    require(pre_tokens == next_tokens == _FAR, "pre_tokens and next_tokens: the default")


def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    return_value: bool,
) -> tuple[Tensor, Tensor]:
    """The best positions of each token, best first, then -1."""
    rules.unused(return_value=return_value)
    _far(pre_tokens, next_tokens)
    rules.one_of("layouts, as far as simulated", (layout_query, layout_key), [("TND", "PA_BSND")])
    rules.one_of("sparse_mode", sparse_mode, [3])
    rules.one_of("sparse_count", sparse_count, _COUNTS)
    for name, x, dims in (("query", query, 3), ("key", key, 4), ("weights", weights, 2)):
        rules.tensor(name, x, HALVES, dims)
    rules.same_dtype(query=query, key=key, weights=weights)
    rules.shape("weights", weights, query.shape[:2])
    rules.shape("key", key, (*key.shape[:2], 1, query.shape[2]))
    out = torch.full((query.shape[0], 1, sparse_count), -1, dtype=torch.int32)
    for start, end, length, blocks in _sequences(
        query, key, actual_seq_lengths_query, actual_seq_lengths_key, block_table
    ):
        keys = key[blocks].flatten(0, 1)[:length, 0].float()
        for token in range(start, end):
            seen = length - (end - token) + 1
            products = torch.relu(query[token].float() @ keys[:seen].t())
            scores = (products * weights[token, :, None].float()).sum(0)
            best = scores.sort(descending=True, stable=True).indices[:sparse_count]
            out[token, 0, : len(best)] = best.int()
    return out, torch.full((1,), torch.nan)


def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    return_softmax_lse: bool,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that see nothing are NaN: what they are is not documented."""
    rules.unused(return_softmax_lse=return_softmax_lse, sinks=sinks)
    _far(pre_tokens, next_tokens)
    rules.one_of("layouts, as far as simulated", (layout_query, layout_kv), [("TND", "PA_BSND")])
    rules.one_of("sparse_mode", sparse_mode, [3])
    rules.one_of("sparse_block_size", sparse_block_size, [1])
    rules.one_of("attention_mode", attention_mode, [0, 2])
    require(
        value is not None and query_rope is not None and key_rope is not None,
        "value, query_rope and key_rope",
    )
    assert value is not None and query_rope is not None and key_rope is not None
    for name, x, dims in (
        ("query", query, 3),
        ("key", key, 4),
        ("value", value, 4),
        ("query_rope", query_rope, 3),
        ("key_rope", key_rope, 4),
    ):
        rules.tensor(name, x, HALVES, dims)
    rules.same_dtype(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    rules.tensor("sparse_indices", sparse_indices, (torch.int32,), 3)
    rules.shape("key", key, (*key.shape[:2], 1, query.shape[2]))
    rules.shape("value", value, key.shape)
    rules.shape("query_rope", query_rope, (*query.shape[:2], query_rope.shape[2]))
    rules.shape("key_rope", key_rope, (*key.shape[:2], 1, query_rope.shape[2]))
    rules.shape("sparse_indices", sparse_indices, (query.shape[0], 1, sparse_indices.shape[2]))
    if attention_mode == 2:
        require(torch.equal(key, value), "in mode 2, keys and values are one")
    out = torch.full_like(query, torch.nan)
    for start, end, length, blocks in _sequences(
        query, key, actual_seq_lengths_query, actual_seq_lengths_kv, block_table
    ):
        k, v, r = (x[blocks].flatten(0, 1)[:length, 0].float() for x in (key, value, key_rope))
        for token in range(start, end):
            chosen = sparse_indices[token, 0]
            count = int((chosen >= 0).sum())
            require(bool((chosen[:count] >= 0).all()), "sparse_indices: valid ones first")
            own = length - (end - token)
            places = chosen[:count][chosen[:count] <= own].long()
            if len(places):
                scores = query[token].float() @ k[places].t() + query_rope[token].float() @ r[places].t()
                out[token] = ((scores * scale_value).softmax(-1) @ v[places]).to(query.dtype)
    nothing = torch.full((1,), torch.nan)
    return out, nothing, nothing
