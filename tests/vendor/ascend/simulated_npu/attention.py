"""The fused attention in layout BSND, with and without pages, and the latent attention of decoding."""

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import HALVES, require

_WIDE = 2147483647
_MASKS = (torch.bool, torch.int8, torch.uint8)


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
    block_table: Tensor | None,
    num_heads: int,
    scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    block_size: int,
    **others: object,
) -> tuple[Tensor, Tensor]:
    rules.unused(**others)
    rules.one_of("input_layout, as far as simulated", input_layout, ["BSND"])
    rules.one_of("sparse_mode", sparse_mode, [0, 3, 4])
    rules.tensor("query", query, HALVES, 4)
    rules.same_dtype(query=query, key=key, value=value)
    batch, tokens, heads, size = query.shape
    require(heads == num_heads, f"num_heads: {heads}, not {num_heads}")
    kv_heads = num_key_value_heads or heads
    require(
        heads % kv_heads == 0 and heads // kv_heads <= 64, f"{heads} heads over {kv_heads} are not served"
    )
    require(
        heads <= 256 and size <= 512 and size % 16 == 0,
        f"up to 256 heads of a multiple of 16 up to 512: {query.shape}",
    )
    require(heads * size < 65535, f"heads times head size below 65535, not {heads * size}")
    if block_table is None:
        require(block_size == 0, "block_size: of pages")
        for name, x in (("key", key), ("value", value)):
            rules.tensor(name, x, HALVES, 4)
            rules.shape(name, x, (batch, key.shape[1], kv_heads, size))
        ends = [key.shape[1]] * batch if actual_seq_lengths_kv is None else list(actual_seq_lengths_kv)
        require(
            len(ends) == batch and max(ends) <= key.shape[1],
            f"actual_seq_lengths_kv: {batch} up to {key.shape[1]}",
        )
        sequences = [(key[row, :end], value[row, :end]) for row, end in enumerate(ends)]
        slots = key.shape[1]
    else:
        sequences = _from_pages(query, key, value, block_table, block_size, actual_seq_lengths_kv, kv_heads)
        slots = block_table.shape[1] * block_size
    queries = [tokens] * batch if actual_seq_lengths is None else list(actual_seq_lengths)
    require(len(queries) == batch and max(queries) <= tokens, f"actual_seq_lengths: {batch} up to {tokens}")
    visible = _visible(tokens, atten_mask, sparse_mode, pre_tokens, next_tokens, (batch, slots))
    out = torch.full_like(query, torch.nan)
    for row, (keys, values) in enumerate(sequences):
        count = queries[row]
        out[row, :count] = _attend(
            query[row, :count], keys, values, scale, visible(row, count, keys.shape[0])
        )
    return out, torch.zeros(1)


def _from_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    block_size: int,
    lengths: list[int] | None,
    kv_heads: int,
) -> list[tuple[Tensor, Tensor]]:
    _, tokens, _, size = query.shape
    for name, x in (("key", key), ("value", value)):
        rules.tensor(name, x, HALVES, 3)
        rules.shape(f"{name} in pages of BSND", x, (key.shape[0], block_size, kv_heads * size))
    require(kv_heads * size <= 65535, "heads times head size of pages up to 65535")
    require(block_size % (128 if tokens > 1 else 16) == 0 and block_size > 0, f"block_size: not {block_size}")
    require(tokens == 1 or block_size <= 512, f"block_size: up to 512, not {block_size}")
    return _pages_of(query, key, value, table, block_size, lengths, kv_heads)


def _pages_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    block_size: int,
    lengths: list[int] | None,
    kv_heads: int,
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [length, kv_heads, size] of each row of a block table."""
    batch, size = query.shape[0], query.shape[3]
    rules.tensor("block_table", table, (torch.int32,), 2)
    require(table.shape[0] == batch, f"block_table: {batch} rows")
    require(lengths is not None and len(lengths) == batch, f"actual_seq_lengths_kv: {batch} of them")
    assert lengths is not None
    found = []
    for row, length in enumerate(lengths):
        require(0 < length <= table.shape[1] * block_size, f"actual_seq_lengths_kv: not {length}")
        blocks = table[row, : -(-length // block_size)].long()
        rules.within("block_table", blocks, 0, key.shape[0] - 1)
        found.append(tuple(x[blocks].reshape(-1, kv_heads, size)[:length] for x in (key, value)))
    return found


def _visible(tokens: int, mask: Tensor | None, mode: int, before: int, after: int, shape: tuple[int, int]):
    """Returns a function of (row, queries, keys) that gives what is visible, or None for all."""
    if tokens == 1:  # modes, before and after are without effect
        if mask is None:
            return lambda row, queries, keys: None
        rules.tensor("atten_mask", mask, _MASKS, 4)
        rules.shape("atten_mask", mask, (shape[0], 1, 1, shape[1]))
        return lambda row, queries, keys: ~mask[row, 0, :, :keys].bool()
    if mode == 0:
        require(mask is None, "a mask in mode 0 is not simulated")
        return lambda row, queries, keys: None
    require(mask is not None, "modes 3 and 4 read a mask")
    assert mask is not None
    rules.tensor("atten_mask", mask, _MASKS, (2, 4))
    require(mask.shape[-2:] == (2048, 2048), "atten_mask: 2048 x 2048")
    require(
        torch.equal(mask.bool().view(2048, 2048), torch.ones(2048, 2048).triu(1).bool()),
        "atten_mask: a triangle",
    )
    if mode == 3:
        before, after = _WIDE, 0
    require(before >= 0, "pre_tokens: not negative")

    def seen(row: int, queries: int, keys: int) -> Tensor:
        require(after + keys - queries >= 0 and keys >= queries, "each query sees a key")
        own = torch.arange(queries).view(-1, 1) + keys - queries
        distance = torch.arange(keys) - own
        return (distance <= after) & (distance >= -before)

    return seen


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).to(q.dtype).float(), values).to(q.dtype)


def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    atten_mask: Tensor | None,
    actual_seq_kvlen: list[int] | None,
    block_table: Tensor | None,
    num_query_heads: int,
    num_key_value_heads: int,
    softmax_scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    sparse_mode: int,
    block_size: int,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """As far as its document speaks of query_rope and a query of 512 numbers."""
    rules.unused(**others)
    rules.one_of("input_layout, as far as simulated", input_layout, ["BSND"])
    rules.tensor("query", query, HALVES, 4)
    batch, tokens, heads, size = query.shape
    require(query_rope is not None and key_rope is not None, "query_rope and key_rope, as far as simulated")
    assert query_rope is not None and key_rope is not None and block_table is not None
    rules.tensor("query_rope", query_rope, HALVES, 4)
    rules.same_dtype(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    require(size == 512 and 1 <= tokens <= 16, f"queries: 1 to 16 of 512 numbers, not {tokens} of {size}")
    rules.one_of("heads", heads, [1, 2, 4, 8, 16, 32, 64, 128])
    require((num_query_heads, num_key_value_heads) == (heads, 1), f"num_query_heads: {heads}, of keys: 1")
    rules.shape("query_rope", query_rope, (batch, tokens, heads, 64))
    rules.one_of("block_size", block_size, [16, 128])
    rules.tensor("key_rope", key_rope, HALVES, 3)
    rules.shape("key_rope in pages of BSND", key_rope, (*key.shape[:2], 64))
    if tokens == 1:
        require(sparse_mode == 0 and atten_mask is None, "one query: sparse_mode 0 without a mask")
    else:
        require(sparse_mode == 3 and atten_mask is not None, "several queries: sparse_mode 3 with a mask")
    require((pre_tokens, next_tokens) == (_WIDE, _WIDE), "pre_tokens and next_tokens: their defaults")
    pages = torch.cat((key, key_rope), -1), torch.cat((value, torch.zeros_like(key_rope)), -1)
    queries = torch.cat((query, query_rope), -1)
    for name, x in (("key", key), ("value", value)):
        rules.tensor(name, x, HALVES, 3)
        rules.shape(f"{name} in pages of BSND", x, (key.shape[0], block_size, 512))
    slots = block_table.shape[1] * block_size
    sequences = _pages_of(queries, *pages, block_table, block_size, actual_seq_kvlen, 1)
    visible = _visible(tokens, atten_mask, sparse_mode, pre_tokens, next_tokens, (batch, slots))
    out = [
        _attend(queries[row], keys, values, softmax_scale, visible(row, tokens, keys.shape[0]))[..., :512]
        for row, (keys, values) in enumerate(sequences)
    ]
    return torch.stack(out), torch.zeros(1)


def _npu_paged_attention_mla(
    query: Tensor,
    key_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    mla_vheadsize: int,
    out: Tensor,
) -> None:
    """The package documents nothing of it but its schema: sizes and dtypes here are those of its known uses."""
    rules.tensor("query", query, HALVES, 3)
    rules.tensor("key_cache", key_cache, HALVES, 4)
    rules.tensor("block_table", block_table, (torch.int32,), 2)
    rules.tensor("context_lens", context_lens, (torch.int32,), 1)
    rules.tensor("out", out, HALVES, 3)
    rules.same_dtype(query=query, key_cache=key_cache, out=out)
    batch, heads, size = query.shape
    require(
        (heads, 1) == (num_heads, num_kv_heads), f"heads: {heads} and 1, not {num_heads} and {num_kv_heads}"
    )
    rules.shape("key_cache", key_cache, (*key_cache.shape[:2], 1, size))
    rules.shape("out", out, (batch, heads, mla_vheadsize))
    rules.shape("context_lens", context_lens, (batch,))
    require(block_table.shape[0] == batch, f"block_table: {batch} rows")
    for row, length in enumerate(context_lens.tolist()):
        blocks = block_table[row, : -(-length // key_cache.shape[1])].long()
        rules.within("block_table", blocks, 0, key_cache.shape[0] - 1)
        keys = key_cache[blocks].flatten(0, 1)[:length]
        out[row] = _attend(query[row : row + 1], keys, keys[..., :mla_vheadsize], scale_value, None)[0]
