"""Attention of prompts and of single queries. A query that sees no key gives NaN: nothing is said of it."""

from itertools import pairwise

import torch
from torch import Tensor

from tests.vendor.camb.simulated_mlu import caches, rules
from tests.vendor.camb.simulated_mlu.rules import FLOATS, require


def _sequence(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, right: int) -> Tensor:
    """q [queries, heads, size] over k, v [keys, kv_heads, ...]; the last query stands at the last key."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    away = torch.arange(k.shape[0]) - (torch.arange(q.shape[0]) + k.shape[0] - q.shape[0])[:, None]
    hidden = torch.zeros_like(away, dtype=torch.bool)
    if causal:
        hidden |= away > 0
    if left >= 0:
        hidden |= away < -left
    if right >= 0:
        hidden |= away > right
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    values = values.nan_to_num(nan=0.0) if bool(hidden.any()) else values
    return torch.einsum("hqk,khd->qhd", probabilities, values).to(q.dtype)


def _ends(name: str, ends: Tensor | None, longest: int) -> list[int]:
    """A cusum of lengths, [batch + 1]."""
    require(ends is not None, f"{name}: where queries are packed")
    assert ends is not None
    rules.tensor(name, ends, (torch.int32,), 1)
    places = ends.tolist()
    lengths = [after - before for before, after in pairwise(places)]
    require(
        places[0] == 0 and min(lengths) >= 1,
        f"{name}: from 0 on, and no sequence without tokens, not {places}",
    )
    require(max(lengths) == longest, f"the maximum of {name}: {max(lengths)}, not {longest}")
    return places


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_kv: Tensor | None,
    max_seq_len_q: int,
    max_seq_len_kv: int,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    compute_dtype: torch.dtype,
    block_tables: Tensor | None,
    out_dtype: torch.dtype,
    q_block_size: int,
    k_block_size: int,
    **others: object,
) -> Tensor:
    rules.unused(**others)
    rules.one_of("compute_dtype", compute_dtype, [torch.float32])
    require((q_block_size, k_block_size) == (256, 128), "block sizes of sparsity, as far as simulated")
    rules.tensor("q", q, FLOATS, 3, gaps=True)
    rules.dense_heads("q", q)
    starts_q = _ends("cu_seq_lens_q", cu_seq_lens_q, max_seq_len_q)
    starts_kv = _ends("cu_seq_lens_kv", cu_seq_lens_kv, max_seq_len_kv)
    require(len(starts_q) == len(starts_kv), "cu_seq_lens_q and cu_seq_lens_kv: of one batch")
    require(starts_q[-1] == q.shape[0], f"q: {starts_q[-1]} tokens, not {q.shape[0]}")
    lengths = [after - before for before, after in pairwise(starts_kv)]
    if block_tables is not None:
        caches.check_pages(q, k, v, block_tables, lengths, (16,))
        parts = [
            (caches.pages(k, row, length), caches.pages(v, row, length))
            for row, length in zip(block_tables, lengths, strict=True)
        ]
    else:
        for name, x in (("k", k), ("v", v)):
            rules.tensor(name, x, FLOATS, 3, gaps=True)
            rules.dense_heads(name, x)
            require(x.shape[0] == starts_kv[-1], f"{name}: {starts_kv[-1]} tokens, not {x.shape[0]}")
        rules.same_dtype(q=q, k=k, v=v)
        require(k.shape[1] == v.shape[1], "k and v: of as many heads")
        parts = [(k[a:b], v[a:b]) for a, b in pairwise(starts_kv)]
    heads = k.shape[1]
    require(
        q.shape[2] == k.shape[-1] and q.shape[1] % heads == 0, "q: k's head size, a multiple of its heads"
    )
    require(out is not None, "out, as far as simulated")
    assert out is not None
    rules.tensor("out", out, (v.dtype,), 3, gaps=True)
    rules.dense_heads("out", out)
    rules.shape("out", out, (*q.shape[:2], v.shape[-1]))
    require(out.untyped_storage().data_ptr() != q.untyped_storage().data_ptr(), "out: not over q")
    for row, (keys, values) in enumerate(parts):
        first, end = starts_q[row : row + 2]
        require(
            end - first <= keys.shape[0] or not is_causal, "as many keys as queries, or which are hidden?"
        )
        out[first:end] = _sequence(
            q[first:end], keys, values, softmax_scale, is_causal, window_size_left, window_size_right
        )
    return out


def single_query_cached_kv_attn(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    out: Tensor | None,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    windows_size_left: int,
    windows_size_right: int,
    softmax_scale: float,
    kv_cache_quant_bit_size: int,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    head_size_v: int,
    max_seq_q: int,
    **others: object,
) -> Tensor:
    rules.unused(**others)
    require((kv_cache_quant_bit_size, max_seq_q) == (-1, -1), "the defaults, as far as simulated")
    rules.one_of("compute_dtype", compute_dtype, [torch.float32])
    require(windows_size_right == -1, f"windows_size_right: reserved, -1, not {windows_size_right}")
    rules.tensor("q", q, FLOATS, 4, gaps=True)
    rules.dense_heads("q", q)
    batch, queries, heads, size = q.shape
    require(queries == 1, f"q: one query a sequence, as far as simulated, not {queries}")
    rules.tensor("context_lens", context_lens, (torch.int32,), 1)
    rules.shape("context_lens", context_lens, (batch,))
    lengths = context_lens.tolist()
    require(min(lengths) >= 1, "context_lens: of 0 nothing is said")
    require(
        max_context_len <= 0 or max_context_len >= max(lengths), f"max_context_len: {max(lengths)} at least"
    )
    require(out is not None, "out, as far as simulated")
    assert out is not None
    size_v = head_size_v
    if v_cache is None:  # "included by k_cache": both begin with each slot's first number
        require(size_v >= 1, "head_size_v: without v_cache, as the vendor's vLLM gives it beside out")
        require(
            k_cache.shape[3] == max(size, size_v), f"cache_dim: {max(size, size_v)}, the larger head size"
        )
        v_cache = k_cache
    else:
        require(size_v == -1, "head_size_v: -1 beside v_cache, as in the vendor's vLLM")
        require(k_cache.shape[3] == size, "q: the cache's head size")
        size_v = v_cache.shape[3]
    caches.check_pages(q, k_cache, v_cache, block_tables, lengths, (1, 2, 4, 8, 16, 32, 64))
    require(heads % k_cache.shape[1] == 0, "q: a multiple of the cache's heads")
    require(heads // k_cache.shape[1] <= 128, "q: up to 128 heads to a key")
    rules.tensor("out", out, (q.dtype,), 4, gaps=True)
    rules.dense_heads("out", out)
    rules.shape("out", out, (batch, 1, heads, size_v))
    require(out.untyped_storage().data_ptr() != q.untyped_storage().data_ptr(), "out: not over q")
    for row, length in enumerate(lengths):
        k, v = (caches.pages(cache, block_tables[row], length) for cache in (k_cache, v_cache))
        k, v = k[..., :size], v[..., :size_v]
        out[row] = _sequence(q[row], k, v, softmax_scale, True, windows_size_left, -1)
    return out
