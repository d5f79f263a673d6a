"""flash_attn: what csrc/flash_attn/flash_api.cpp of flash-attention checks, with MetaX's sizes (vLLM-metax)."""

from itertools import pairwise

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import HALVES, require

_UNUSED_ROWS = torch.nan
"""What rows of the result hold behind the last sequence."""


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    s_aux=None,
):
    rules.unused(dropout_p=dropout_p, deterministic=deterministic, return_attn_probs=return_attn_probs)
    rules.tensor("q", q, HALVES, 3, gaps=True)
    rules.tensor("cu_seqlens_q", cu_seqlens_q, (torch.int32,), 1)
    batch = cu_seqlens_q.numel() - 1
    rules.tensor("cu_seqlens_k", cu_seqlens_k, (torch.int32,), 1)
    rules.shape("cu_seqlens_k", cu_seqlens_k, (batch + 1,))
    require(batch > 0, "batch size must be positive")
    ends, key_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    require(
        ends == sorted(ends) and ends[0] == 0 and ends[-1] <= q.shape[0], "cu_seqlens_q: from 0, rising, of q"
    )
    require(key_ends == sorted(key_ends) and key_ends[0] == 0, "cu_seqlens_k: from 0, rising")
    lengths = [end - start for start, end in pairwise(key_ends)]
    _most("max_seqlen_q", max_seqlen_q, [end - start for start, end in pairwise(ends)])
    _most("max_seqlen_k", max_seqlen_k, lengths)
    if block_table is None:
        for name, x in (("k", k), ("v", v)):
            rules.tensor(name, x, HALVES, 3, gaps=True, empty=True)
            rules.shape(name, x, (k.shape[0], k.shape[1], q.shape[2]))
        require(key_ends[-1] <= k.shape[0], "cu_seqlens_k: of k")
        sequences = [(k[start:end], v[start:end]) for start, end in pairwise(key_ends)]
    else:
        sequences = _from_pages(q, k, v, block_table, lengths)
    _check_heads(q, k, v)
    given = _given(q, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    out = torch.full(q.shape, _UNUSED_ROWS, dtype=q.dtype)
    for row, (keys, values) in enumerate(sequences):
        out[ends[row] : ends[row + 1]] = _attend(q[ends[row] : ends[row + 1]], keys, values, given)
    return out


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    s_aux=None,
):
    rules.unused(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx)
    rules.unused(cache_leftpad=cache_leftpad, num_splits=num_splits, return_softmax_lse=return_softmax_lse)
    require(rotary_interleaved is True, "rotary_interleaved is not simulated")
    require(
        block_table is not None and isinstance(cache_seqlens, Tensor), "pages and their lengths, as simulated"
    )
    assert block_table is not None and isinstance(cache_seqlens, Tensor)
    rules.tensor("q", q, HALVES, 4, gaps=True)
    rules.tensor("cache_seqlens", cache_seqlens, (torch.int32,), 1)
    rules.shape("cache_seqlens", cache_seqlens, (q.shape[0],))
    sequences = _from_pages(q[:, 0], k_cache, v_cache, block_table, cache_seqlens.tolist())
    _check_heads(q, k_cache, v_cache)
    given = _given(q, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    return torch.stack([_attend(q[row], *pair, given) for row, pair in enumerate(sequences)])


def _most(name: str, most: object, lengths: list[int]) -> None:
    require(
        type(most) is int and most >= max(lengths), f"{name}: an int, at least {max(lengths)}, not {most!r}"
    )


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    rules.same_dtype(q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.stride(-1) == 1, f"{name}: contiguous last dimension")
    heads, size = q.shape[-2:]
    require(size % 8 == 0 and size <= 512, f"head sizes: multiples of 8 up to 512, not {size}")
    require(heads % k.shape[-2] == 0, f"{heads} heads over {k.shape[-2]}")


def _from_pages(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each sequence."""
    for name, x in (("k", k), ("v", v)):
        rules.tensor(name, x, HALVES, 4, gaps=True)
        rules.shape(name, x, (*k.shape[:3], q.shape[-1]))
    page = k.shape[1]
    require(page % 16 == 0, f"pages of a multiple of 16, not {page}")
    rules.tensor("block_table", table, (torch.int32,), 2)
    require(table.shape[0] == len(lengths), f"block_table: {len(lengths)} rows")
    found = []
    for row, length in enumerate(lengths):
        require(0 <= length <= table.shape[1] * page, f"lengths: up to {table.shape[1] * page}, not {length}")
        blocks = table[row, : -(-length // page)].long()
        rules.within("block_table", blocks, 0, k.shape[0] - 1)
        found.append(tuple(x[blocks].reshape(-1, *x.shape[2:])[:length] for x in (k, v)))
    return found


def _given(q, scale, causal, window, softcap, slopes, s_aux) -> dict:
    heads = q.shape[-2]
    if slopes is not None:
        rules.tensor("alibi_slopes", slopes, (torch.float32,), 1)
        rules.shape("alibi_slopes", slopes, (heads,))
    if s_aux is not None:
        rules.tensor("s_aux", s_aux, (q.dtype,), 1)
        rules.shape("s_aux", s_aux, (heads,))
    require(slopes is None or s_aux is None, "alibi_slopes and s_aux together are not simulated")
    require(isinstance(causal, bool), "causal: a bool")
    left, right = window
    return {
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "left": left,
        "right": 0 if causal else right,
        "softcap": softcap,
        "slopes": slopes,
        "sinks": s_aux,
    }


def _attend(q: Tensor, k: Tensor, v: Tensor, given: dict) -> Tensor:
    """q [tokens, heads, size] over k and v [keys, kv heads, size]; queries are the last tokens."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * given["scale"]
    if given["softcap"] > 0:
        scores = given["softcap"] * torch.tanh(scores / given["softcap"])
    away = torch.arange(len(k)) - (torch.arange(len(q)).view(-1, 1) + len(k) - len(q))
    if given["slopes"] is not None:
        scores = scores - given["slopes"].view(-1, 1, 1) * away.abs()
    left, right = given["left"], given["right"]
    hidden = (away < -left if left >= 0 else away < -(2**30)) | (away > right if right >= 0 else away > 2**30)
    scores = scores.masked_fill(hidden, -torch.inf)
    sinks = (
        torch.full((q.shape[1], 1, 1), -torch.inf)
        if given["sinks"] is None
        else given["sinks"].float().view(-1, 1, 1)
    )
    top = torch.cat((scores, sinks.expand(-1, len(q), 1)), -1).amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(sinks - top)
    blind = hidden.all(-1).view(1, -1, 1) if len(k) else torch.ones(1, len(q), 1, dtype=torch.bool)
    weights = (weights / total.masked_fill(total == 0, 1.0)).masked_fill(blind, 0.0).to(q.dtype).float()
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
