"""Write new tokens into the paged KV cache."""

import weakref

import torch
from torch import Tensor

from dlinfer.errors import KernelDeclined
from dlinfer.ops.attention.kv_cache import check_slots
from dlinfer.vendor.ascend import captured, chips, layouts, refusing
from dlinfer.vendor.base import refuses


class _Looked:
    """The result of the last check of slots. A step's layers pass the same slots, so only the first waits for the card.

    New slots, and slots whose version counter has changed, are checked again. A tensor made in inference mode has no
    version counter, so it must not be written after its first check.
    """

    def __init__(self) -> None:
        self._slots: weakref.ref[Tensor] | None = None
        self._key: tuple[int, int] | None = None
        self._padded = False

    def padded(self, slots: Tensor, keys: Tensor) -> bool:
        """Return whether ``slots`` has negative entries, which mark padding rows.

        Raises OpArgumentError for a slot beyond the key cache ``keys``.
        """
        key = layouts.version(slots), keys.shape[0] * keys.shape[1]
        if self._slots is None or self._slots() is not slots or self._key != key:
            check_slots(slots, keys)
            self._padded = bool((slots < 0).any())
            self._slots, self._key = weakref.ref(slots), key
        return self._padded


_looked = _Looked()


@refuses(lambda k, v, k_cache, v_cache, kv_start_indices: refusing.floating(k))
def fill_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor) -> None:
    if kv_start_indices.numel() == 0:
        return
    slots, tasks = kv_start_indices, captured.current()
    if tasks is not None:  # a graph's slots cannot be read
        k, v, slots = _captured(tasks, k, v, k_cache, v_cache, slots)
    elif _looked.padded(slots, k_cache):
        kept = (slots >= 0).nonzero().squeeze(-1)
        if kept.numel() == 0:
            return
        k, v, slots = k[kept], v[kept], slots[kept]
    if chips.current().fused_attention and k_cache.is_contiguous() and v_cache.is_contiguous():
        torch.ops.npu.npu_scatter_pa_kv_cache(
            k.contiguous(),
            v.contiguous(),
            k_cache,
            v_cache,
            slots.contiguous(),
            cache_mode=layouts.CACHE_MODE,
        )
        return
    # values that are a part of the keys are written with them, or else once more, with the same numbers
    places = torch.stack((slots // k_cache.shape[1], slots % k_cache.shape[1]), dim=-1)
    for new, cache in ((k, k_cache), (v, v_cache)):
        torch.ops.npu.npu_scatter_nd_update_(cache, places, new.contiguous())


def _captured(
    tasks: captured.CapturedLengths,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_start_indices: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return k, v and slots for a captured graph, with other values for padding rows (rows with a negative slot).

    A padding row gets a slot that no other row uses, and the k and v that this slot holds already. So its write changes
    nothing. Raises KernelDeclined if the cache has fewer than two slots for each row.
    tasks: the capture in progress (``captured.current()``), which computes the new slots.
    """
    block_size, rows = k_cache.shape[1], kv_start_indices.shape[0]
    count = k_cache.shape[0] * block_size
    if count < 2 * rows:
        raise KernelDeclined(
            reason=f"{rows} rows of a captured graph need twice as many slots, but the cache has {count}"
        )
    slots, unwritten = tasks.slots(kv_start_indices), tasks.unwritten(kv_start_indices).view(-1, 1, 1)
    block, offset = slots // block_size, slots % block_size
    new = [torch.where(unwritten, cache[block, offset], x) for x, cache in ((k, k_cache), (v, v_cache))]
    return new[0], new[1], slots
