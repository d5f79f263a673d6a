"""Decode attention over pages, with one new token of each sequence."""

from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.ascend import refusing
from dlinfer.vendor.ascend.attention import fused
from dlinfer.vendor.ascend.graph.lowerings import latent


@refusing.where(lambda call: latent.refuses(call) if latent.is_latent(call.k_cache, call.v_cache) else None)
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
) -> Tensor:
    """Lower to one call of the fused attention for all sequences, in layout BSND. The lengths stay a tensor.

    A padding row has no key, and its block table may hold invalid numbers. So it reads one key of block 0, and its
    result is set to zeros.
    """
    lengths = kv_seqlens.to(torch.int64)
    padding = lengths < 1
    table = block_offsets.to(torch.int32).masked_fill(padding.unsqueeze(-1), 0)
    if latent.is_latent(k_cache, v_cache):
        out = latent.attend(q, k_cache, table, lengths.clamp(min=1), num_q_heads, softmax_scale)
        return out.squeeze(1).masked_fill(padding.view(-1, 1, 1), 0)
    seen: dict[str, Any] = {}
    if window_left >= 0:
        seen["atten_mask"] = fused.outside(lengths, window_left, table.shape[1] * block_size)
    out, _ = torch.ops.air.npu_fused_infer_attention_score(
        q.unsqueeze(1),
        pages(k_cache),
        pages(v_cache),
        actual_seq_lengths_kv=lengths.clamp(min=1),
        block_table=table,
        num_heads=num_q_heads,
        scale=softmax_scale,
        input_layout="BSND",
        num_key_value_heads=num_kv_heads,
        block_size=block_size,
        **seen,
    )
    return out.squeeze(1).masked_fill(padding.view(-1, 1, 1), 0)


def pages(cache: Tensor) -> Tensor:
    """View a cache [blocks, block_size, heads, size] in layout BSND.

    The view is made with -1 for the number of blocks. If the graph read the number from the cache, torchair would copy
    the cache before each write.
    """
    return cache.reshape(-1, cache.shape[1], cache.shape[2] * cache.shape[3])
