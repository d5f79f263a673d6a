"""Writing new tokens into the paged KV cache."""

import weakref

from torch import Tensor

from dlinfer.ops.kv_cache import canonical, check_slots
from dlinfer.vendor.base import refuses
from dlinfer.vendor.camb import layouts, refusing
from dlinfer.vendor.camb.sdk import tmo


class _Checked:
    """The last slots that a look has found to lie in the cache: one wait for the card a step, not a layer.

    Slots made in inference mode are known by their tensor alone, which may not be written anew, as it is for graphs.
    """

    def __init__(self) -> None:
        self._slots: weakref.ref[Tensor] | None = None
        self._key: tuple[int, int] | None = None

    def check(self, slots: Tensor, keys: Tensor) -> None:
        """Raises OpArgumentError for one behind the end of the canonical cache ``keys``."""
        key = layouts.version(slots), keys.shape[0] * keys.shape[1]
        if self._slots is None or self._slots() is not slots or self._key != key:
            check_slots(slots, keys)
            self._slots, self._key = weakref.ref(slots), key


_checked = _Checked()


def _refuses_caches(k: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return "the caches have gaps, of which reshape_paged_cache's documents say nothing"
    return refusing.floating(k)


@refuses(lambda k, v, k_cache, v_cache, kv_start_indices: _refuses_caches(k, k_cache, v_cache))
def fill_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor) -> None:
    if kv_start_indices.numel() == 0:
        return
    _checked.check(kv_start_indices, canonical(k_cache))
    slots = layouts.index(kv_start_indices, k.device)  # negative ones are left out by the vendor
    if k.shape == v.shape:
        tmo().reshape_paged_cache(k.contiguous(), v.contiguous(), k_cache, v_cache, slots)
        return
    for new, cache in ((k, k_cache), (v, v_cache)):
        tmo().reshape_paged_cache(new.contiguous(), None, cache, None, slots)
