"""flash_mla as DeepSeek declares it now, which vLLM-metax calls since May 2026: a schedule that the first call fills.

MetaX publishes no source of such a build. Rules are those of DeepSeek's flash_mla_interface.py and
csrc/api/dense_decode.h; numbers are as of MetaX's own. A schedule says how many pages of each sequence are looked at,
so that one which was made for other lengths gives other numbers, as the true one's ranges of pages do.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import require
from tests.vendor.maca.simulated_card import calling, latent

PAGE = 64


@dataclass
class FlashMLASchedMeta:
    """A schedule, and what it was made for."""

    made_for: tuple | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def get_mla_metadata(*args, **kwargs):
    """An empty one, whatever is given."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
):
    schedule = tile_scheduler_metadata
    require(isinstance(schedule, FlashMLASchedMeta), "tile_scheduler_metadata: a FlashMLASchedMeta")
    require(num_splits is None, "num_splits: None")
    rules.unused(
        is_fp8_kvcache=is_fp8_kvcache, indices=indices, attn_sink=attn_sink, extra_k_cache=extra_k_cache
    )
    rules.unused(extra=extra_indices_in_kvcache, topk_length=topk_length, extra_topk=extra_topk_length)
    made_for = (*q.shape[:3], *k_cache.shape[1:3], causal)
    require(schedule.made_for in (None, made_for), f"a schedule for {schedule.made_for}, not for {made_for}")
    schedule.made_for = made_for
    out, lse, *made = _dense_decode_fwd(
        q,
        k_cache,
        head_dim_v,
        cache_seqlens,
        block_table,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal,
        schedule.tile_scheduler_metadata,
        schedule.num_splits,
    )
    if schedule.num_splits is None:  # it gives back what it was given, which here would be copies
        schedule.tile_scheduler_metadata, schedule.num_splits = made
    return out, lse


def dense_decode_fwd(
    q: Tensor,
    kcache: Tensor,
    head_size_v: int,
    seqlens_k: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    is_causal: bool,
    tile_scheduler_metadata: Tensor | None,
    num_splits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, schedule, splits): the last two as given, or made for these lengths."""
    latent._types(head_size_v, softmax_scale, is_causal)
    latent.check(q, kcache, head_size_v, seqlens_k, block_table)
    require(kcache.shape[1] == PAGE, f"page_block_size: {PAGE}, not {kcache.shape[1]}")
    lengths = seqlens_k.tolist()
    if tile_scheduler_metadata is None or num_splits is None:
        parts = latent.PROCESSORS // kcache.shape[2] // -(-q.shape[1] * q.shape[2] // kcache.shape[2] // 64)
        tile_scheduler_metadata = torch.zeros(max(parts, 1), latent.SCHEDULE, dtype=torch.int32)
        pages = torch.tensor([0, *(max(-(-length // PAGE), 1) for length in lengths)])
        num_splits = pages.cumsum(0).to(torch.int32)
    rules.shape("num_splits", num_splits, (len(lengths) + 1,))
    looked_at = [count * PAGE for count in num_splits.diff().tolist()]
    seen = [min(pair) for pair in zip(lengths, looked_at, strict=True)]
    out, lse = latent.attend(q, kcache, seen, block_table, softmax_scale, is_causal)
    return out, lse, tile_scheduler_metadata, num_splits


_dense_decode_fwd = calling.simulated("dense_decode_fwd", dense_decode_fwd)
