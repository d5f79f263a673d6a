"""Sparse attention on CPU: gather the chosen keys of many tokens from their pages, then attend in one product."""

import torch
from torch import Tensor

from dlinfer.ops.attention.kv_cache import canonical
from dlinfer.ops.attention.sparse import chosen_positions

_GATHERED = 1 << 22  # most numbers gathered at once: 16 MiB of float32


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    sparse_count: int,
) -> Tensor:
    return chosen_positions(
        query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key, block_table, sparse_count
    )


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
    tokens, heads = query.shape[:2]
    values = canonical(value)
    out = query.new_empty(tokens, heads, values.shape[3])
    if not tokens:
        return out
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys, turned = canonical(key), canonical(key_rope)
    size = keys.shape[1]
    ends = actual_seq_lengths_query.long()
    lengths = ends.diff(prepend=ends.new_zeros(1))
    sequence = torch.repeat_interleave(lengths, output_size=tokens)
    own = torch.arange(tokens) + (kv_seqlens.long() - ends)[sequence]
    table = block_table.long()
    step = max(
        1, _GATHERED // (sparse_indices.shape[2] * (keys.shape[3] + values.shape[3] + turned.shape[3]) or 1)
    )
    for start in range(0, tokens, step):
        some = slice(start, start + step)
        chosen = sparse_indices[some, 0].long()
        hidden = (chosen < 0) | (chosen > own[some, None])
        places = chosen.masked_fill(hidden, 0)
        blocks, offsets = table[sequence[some, None], places // size], places % size
        k, v, r = (x[blocks, offsets, 0].to(dtype) for x in (keys, values, turned))
        scores = query[some].to(dtype) @ k.transpose(1, 2) + query_rope[some].to(dtype) @ r.transpose(1, 2)
        unseen = hidden[:, None]
        scores = (scores * scale).masked_fill(unseen, -torch.inf)
        seen = scores.softmax(-1).masked_fill(unseen, 0)
        out[some] = seen @ v.masked_fill(hidden[:, :, None], 0)
    return out
