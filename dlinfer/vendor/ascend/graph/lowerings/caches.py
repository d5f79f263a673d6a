"""Writing into the paged KV cache."""

import torch
from torch import Tensor

from dlinfer.vendor.ascend import chips, layouts, refusing
from dlinfer.vendor.base import refuses


def _refuses(k_cache: Tensor, v_cache: Tensor) -> str | None:
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return "the caches have gaps"
    return refusing.lacking(chips.current().fused_attention, "npu_scatter_pa_kv_cache")


@refuses(lambda k, v, k_cache, v_cache, kv_start_indices: _refuses(k_cache, v_cache))
def fill_kv_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """``ScatterPaKvCache``. torchair writes into the caches' own memory where nothing else reads what was there."""
    return torch.ops.npu.npu_scatter_pa_kv_cache_functional(
        k, v, k_cache, v_cache, kv_start_indices, cache_mode=layouts.CACHE_MODE
    )
