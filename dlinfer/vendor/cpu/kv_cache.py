"""Writing the paged KV cache on CPU."""

from torch import Tensor

from dlinfer.ops.kv_cache import check_slots


def fill_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor) -> None:
    if not kv_start_indices.numel():
        return
    check_slots(kv_start_indices, k_cache)
    slots = kv_start_indices.long()
    if int(slots.min()) < 0:
        kept = (slots >= 0).nonzero().squeeze(1)
        slots, k, v = slots[kept], k[kept], v[kept]
    block_size = k_cache.shape[1]
    place = (slots // block_size, slots % block_size)
    k_cache.index_put_(place, k)
    v_cache.index_put_(place, v)
