"""Writes to the paged KV cache."""

import torch
from torch import Tensor

from dlinfer.vendor.ascend import chips, layouts, refusing
from dlinfer.vendor.base import refuses


def _refuses(k_cache: Tensor, v_cache: Tensor) -> str | None:
    if not k_cache.is_contiguous() or not (v_cache.is_contiguous() or _are_of_the_keys(k_cache, v_cache)):
        return "the caches are not contiguous"
    return refusing.lacking(chips.current().fused_attention, "npu_scatter_pa_kv_cache")


def _are_of_the_keys(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether the caches are a latent cache: values are the first elements of the keys, in the same memory."""
    places = [(cache.shape[:3], cache.stride(), cache.storage_offset()) for cache in (k_cache, v_cache)]
    return places[0] == places[1] and k_cache.untyped_storage()._cdata == v_cache.untyped_storage()._cdata


@refuses(lambda k, v, k_cache, v_cache, kv_start_indices: _refuses(k_cache, v_cache))
def fill_kv_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Lower to ``ScatterPaKvCache`` or, for a latent cache, to ``ScatterNdUpdate``.

    torchair writes into the caches' own memory unless other nodes read the old contents.
    """
    if v_cache.is_contiguous():
        return torch.ops.npu.npu_scatter_pa_kv_cache_functional(
            k, v, k_cache, v_cache, kv_start_indices, cache_mode=layouts.CACHE_MODE
        )
    size_v, block_size = v.shape[-1], k_cache.shape[1]
    block = kv_start_indices // block_size
    places = torch.stack((block, kv_start_indices - block * block_size), dim=-1)
    new = torch.cat((v, k.split([size_v, k.shape[-1] - size_v], -1)[1]), dim=-1)
    keys = torch.ops.npu.npu_scatter_nd_update(k_cache, places, new)
    return keys, keys[..., :size_v]
