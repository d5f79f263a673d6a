"""Decode attention over DeepSeek's latent cache, with one new token of each sequence.

The eager kernel calls _npu_paged_attention_mla, but torchair has no converter for that op. So the lowering calls
npu_fused_infer_attention_score_v2. That op takes the rotated parts of queries and keys as separate contiguous arguments
(query_rope, key_rope). So the lowering gathers the pages, and copies the two parts of the keys apart.
"""

from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.ascend.attention import latent


def is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether two caches [blocks, slots, heads, size] have the head count and sizes of a latent cache."""
    return latent.fits(k_cache.shape[2], k_cache.shape[3], v_cache.shape[3])


def refuses(call: Any) -> str | None:
    """Return a reason to run a call over a latent cache on the eager kernel; None if a graph can run it."""
    if call.num_q_heads not in latent.HEADS:
        return (
            f"a graph over a latent cache needs one of {', '.join(map(str, latent.HEADS))} heads, not "
            f"{call.num_q_heads}"
        )
    if call.block_size not in latent.PAGES:
        return (
            f"a graph over a latent cache needs blocks of {latent.PAGES[0]} or {latent.PAGES[1]} slots, not "
            f"{call.block_size}"
        )
    return None


def attend(q: Tensor, k_cache: Tensor, table: Tensor, lengths: Tensor, heads: int, scale: float) -> Tensor:
    """Return the attention of one new token of each sequence, [sequences, 1, heads, 512].

    q: [sequences, heads, 576]. table: [sequences, blocks] int32; entries after a sequence's last block are not read.
    lengths: [sequences] int64, at least 1.
    """
    rows, width = table.shape
    block_size = k_cache.shape[1]
    entry = torch.arange(width, device=table.device)
    unused = entry * block_size >= lengths.unsqueeze(-1)
    chosen = table.masked_fill(unused, 0).reshape(-1)
    sizes = [latent.SIZE, latent.ROPE]
    pages = k_cache.index_select(0, chosen).reshape(-1, block_size, sum(sizes))
    keys, rotated = pages.split(sizes, -1)
    query, query_rope = q.unsqueeze(1).split(sizes, -1)
    first = torch.arange(rows, device=table.device) * width
    places = (first.unsqueeze(-1) + entry).to(torch.int32)
    out, _ = torch.ops.air.npu_fused_infer_attention_score_v2(
        query.contiguous(),
        keys.contiguous(),
        keys.contiguous(),
        query_rope=query_rope.contiguous(),
        key_rope=rotated.contiguous(),
        actual_seq_kvlen=lengths,
        block_table=places,
        num_query_heads=heads,
        num_key_value_heads=1,
        softmax_scale=scale,
        input_layout="BSND",
        block_size=block_size,
    )
    return out
