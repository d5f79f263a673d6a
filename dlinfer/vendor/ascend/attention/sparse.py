"""DeepSeek's sparse attention over pages: the vendor's indexer chooses positions, which the attention then reads."""

import torch
from torch import Tensor

from dlinfer.vendor.ascend import chips, refusing
from dlinfer.vendor.ascend.attention import fused

_NONE = 2147483647  # sorts after every position
_COUNTS = (*range(1, 2049), 3072, 4096, 5120, 6144, 7168, 8192)  # of npu_lightning_indexer's sparse_count


def _refuses(query: Tensor, *caches: Tensor) -> str | None:
    if not all(cache.is_contiguous() for cache in caches):
        return "the caches are not contiguous"
    return refusing.first(
        (
            refusing.lacking(chips.current().sparse_attention, "sparse attention"),
            refusing.floating(query, refusing.HALVES),
        )
    )


def _refuses_indexer(query: Tensor, key: Tensor, sparse_count: int) -> str | None:
    if sparse_count not in _COUNTS:
        return (
            "npu_lightning_indexer supports a sparse_count up to 2048 and some larger ones, not "
            f"{sparse_count}"
        )
    return _refuses(query, key)


def _lengths(lengths: Tensor, query: Tensor) -> Tensor:
    return lengths.to(query.device, torch.int32).contiguous()


@refusing.where(lambda call: _refuses_indexer(call.query, call.key, call.sparse_count))
def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    sparse_count: int,
) -> Tensor:
    if query.shape[0] == 0:
        return query.new_empty((0, 1, sparse_count), dtype=torch.int32)
    chosen, _ = torch.ops.npu.npu_lightning_indexer(
        query.contiguous(),
        key,
        weights.contiguous(),
        actual_seq_lengths_query=_lengths(actual_seq_lengths_query, query),
        actual_seq_lengths_key=_lengths(actual_seq_lengths_key, query),
        block_table=fused.table(block_table),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=sparse_count,
        sparse_mode=3,
    )
    return _rising(chosen, chosen >= 0)


def _rising(positions: Tensor, valid: Tensor) -> Tensor:
    """Return the valid positions of each row in rising order. -1 fills up the row."""
    order = positions.masked_fill(~valid, _NONE).sort(dim=-1).values
    return order.masked_fill(order == _NONE, -1)


@refusing.where(
    lambda call: (
        _refuses(call.query, call.key, call.value, call.key_rope)
        or (None if call.key.shape == call.value.shape else "keys and values must have the same shape")
    )
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
    if query.shape[0] == 0:
        return query.new_empty(query.shape)
    ends, lengths = _lengths(actual_seq_lengths_query, query), _lengths(kv_seqlens, query)
    token = torch.arange(query.shape[0], device=query.device)
    sequence = torch.searchsorted(ends, token, right=True)
    own = lengths[sequence] - (ends[sequence] - token)
    valid = (sparse_indices >= 0) & (sparse_indices <= own.view(-1, 1, 1))
    out, _, _ = torch.ops.npu.npu_sparse_flash_attention(
        query.contiguous(),
        key,
        value,
        _rising(sparse_indices.to(torch.int32), valid),
        scale,
        block_table=fused.table(block_table),
        actual_seq_lengths_query=ends,
        actual_seq_lengths_kv=lengths,
        query_rope=query_rope.contiguous(),
        key_rope=key_rope,
        sparse_block_size=1,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=3,
        attention_mode=2,
    )
    return out.masked_fill(
        ~valid.any(-1, keepdim=True), 0
    )  # queries without keys give zeros; undocumented there
