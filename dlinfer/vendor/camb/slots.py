"""Write new tokens into the paged KV cache."""

import weakref

import torch
from torch import Tensor

from dlinfer.ops.attention.kv_cache import canonical, check_slots
from dlinfer.vendor.base import refuses
from dlinfer.vendor.camb import layouts, refusing
from dlinfer.vendor.camb.sdk import tmo


class _Checked:
    """The last slots that passed the check. A step's layers pass the same slots, so only the first waits for the card.

    New slots, and slots whose version counter has changed, are checked again. A tensor made in inference mode has no
    version counter, so it must not be written after its first check.
    """

    def __init__(self) -> None:
        # one tuple, which is replaced whole: two threads may serve two caches
        self._last: tuple[weakref.ref[Tensor], tuple[int, int]] | None = None

    def check(self, slots: Tensor, keys: Tensor) -> None:
        """Raise OpArgumentError for a slot beyond the cache. keys: the cache in its canonical layout."""
        last, key = self._last, (layouts.version(slots), keys.shape[0] * keys.shape[1])
        if last is None or last[0]() is not slots or last[1] != key:
            check_slots(slots, keys)
            self._last = weakref.ref(slots), key


_checked = _Checked()


def _refuses_caches(k: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    dense = k_cache.is_contiguous() and v_cache.is_contiguous()
    if not dense and not layouts.is_latent(k_cache, v_cache):
        return "the caches are not contiguous, and reshape_paged_cache's documents do not cover such caches"
    return refusing.floating(k)


def _with_values(k: Tensor, v: Tensor) -> Tensor:
    """Return keys that begin with the values: a latent cache stores the values as the first elements of the keys."""
    if k.data_ptr() == v.data_ptr() and k.stride() == v.stride():
        return k.contiguous()
    return torch.cat((v, k[..., v.shape[-1] :]), dim=-1)


@refuses(lambda k, v, k_cache, v_cache, kv_start_indices: _refuses_caches(k, k_cache, v_cache))
def fill_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor) -> None:
    if kv_start_indices.numel() == 0:
        return
    _checked.check(kv_start_indices, canonical(k_cache))
    slots = layouts.index(kv_start_indices, k.device)  # the vendor skips negative slots
    if layouts.is_latent(k_cache, v_cache):
        tmo().reshape_paged_cache(_with_values(k, v), None, k_cache, None, slots)
        return
    if k.shape == v.shape:
        tmo().reshape_paged_cache(k.contiguous(), v.contiguous(), k_cache, v_cache, slots)
        return
    for new, cache in ((k, k_cache), (v, v_cache)):
        tmo().reshape_paged_cache(new.contiguous(), None, cache, None, slots)
