"""Write new tokens into the paged KV cache."""

import torch
from torch import Tensor

from dlinfer.errors import KernelDeclined
from dlinfer.ops.attention.kv_cache import check_slots
from dlinfer.vendor.base import refuses
from dlinfer.vendor.maca import refusing, sdk, sequences
from dlinfer.vendor.maca.kept import LastAnswer
from dlinfer.vendor.maca.latent import begins

_highest = LastAnswer(lambda slots: int(slots.max()))
"""Returns the largest slot, read from the card once a step. The kernel checks it, since the vendor's op does not."""


def _is_latent(k: Tensor, v: Tensor) -> bool:
    """Return whether the sizes allow a latent cache, whose values are the first elements of the keys."""
    return k.shape[1] == 1 and v.shape[2] < k.shape[2]


def _refuses(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor) -> str | None:
    alike = k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride()
    if not alike and not _is_latent(k, v):
        return "reshape_and_cache_flash needs caches of keys and values with the same shape and strides"
    if k_cache.stride(-1) != 1:
        return "the heads of a cache are not contiguous"
    return refusing.floating(k)


@refuses(_refuses)
def fill_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor) -> None:
    latent = _is_latent(k, v)
    if latent and not begins(k_cache, v_cache):
        raise KernelDeclined(
            reason="values smaller than keys are supported only if v_cache is the first part of k_cache"
        )
    if kv_start_indices.numel() == 0:
        return
    # a graph's slots change at each replay and cannot be read during the capture
    if not sdk.capturing() and _highest.of(kv_start_indices) >= k_cache.shape[0] * k_cache.shape[1]:
        check_slots(kv_start_indices, k_cache)  # raises like every kernel of the op
    scale = torch.ones(1, device=k.device)  # unused by caches of the model's own dtype
    slots = kv_start_indices.to(torch.int64).contiguous()
    if latent:
        value = sequences.whole(v.squeeze(1))
        # the values' cache is the keys': v fills the beginning of a key, and only the end of k is written
        end = sequences.whole(k.squeeze(1)[:, v.shape[2] :])
        torch.ops._C_cache_ops.concat_and_cache_mla(value, end, k_cache.squeeze(2), slots, "auto", scale)
        return
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        _heads_together(k),
        _heads_together(v),
        k_cache,
        v_cache,
        slots,
        "auto",
        scale,
        scale,
    )


def _heads_together(x: Tensor) -> Tensor:
    """Return x [tokens, heads, size] with dense heads in a token. Gaps between tokens may stay, as in a packed qkv."""
    together = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    return x if together else x.contiguous()
