"""The paged KV cache on CPU: the ops that write it, and ``Pages``, which copies whole blocks for torch's attention."""

from typing import NamedTuple

import torch
from torch import Tensor

from dlinfer.ops.attention.kv_cache import check_slots
from dlinfer.ops.attention.kv_quantisation import (
    check_apart,
    dequantise,
    is_scaled_by_token,
    quantise,
    read_size,
)
from dlinfer.ops.core.checks import FLOATS, Rules
from dlinfer.vendor.cpu.compiled import compiled

_QUANTISED = Rules("fill_quantised_kv_cache")


def fill_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor) -> None:
    if not kv_start_indices.numel():
        return
    kernel = compiled("fill_kv_cache", k, k_cache) if k.dtype in FLOATS else None
    if kernel is not None:
        try:
            kernel(k, v, k_cache, v_cache, kv_start_indices)
        except RuntimeError:
            check_slots(kv_start_indices, k_cache)  # raises the op's own error for wrong slots
            raise
        return
    check_slots(kv_start_indices, k_cache)
    slots, k, v = _written(kv_start_indices, k, v)
    place = _place(slots, k_cache)
    k_cache.index_put_(place, k)
    v_cache.index_put_(place, v)


def fill_quantised_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_start_indices: Tensor,
    k_scales_zeros: Tensor,
    v_scales_zeros: Tensor,
    quant_bits: int,
) -> None:
    if not kv_start_indices.numel():
        return
    check_slots(kv_start_indices, k_cache)
    check_apart(_QUANTISED, k_cache, v_cache, quant_bits)
    slots, k, v = _written(kv_start_indices, k, v)
    place = _place(slots, k_cache)
    for new, cache, scales_zeros in ((k, k_cache, k_scales_zeros), (v, v_cache, v_scales_zeros)):
        codes, fresh = quantise(new, quant_bits, scales_zeros)
        cache.index_put_(place, codes)
        if fresh is not None:
            scales_zeros.index_put_(place, fresh)


def _written(slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Drop padding tokens, whose slot is negative, from slots, keys and values."""
    slots = slots.long()
    if int(slots.min()) >= 0:
        return slots, k, v
    kept = (slots >= 0).nonzero().squeeze(1)
    return slots[kept], k[kept], v[kept]


def _place(slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    block_size = cache.shape[1]
    return slots // block_size, slots % block_size


class Pages(NamedTuple):
    """A paged cache of keys or of values: [blocks, block_size, kv_heads, size]. It may be quantised."""

    cache: Tensor
    scales_zeros: Tensor | None = None
    quant_bits: int = 0

    @property
    def block_size(self) -> int:
        return self.cache.shape[1]

    @property
    def size(self) -> int:
        return read_size(self.cache, self.quant_bits)

    def read(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of the given blocks.

        If the cache is quantised, only these blocks are dequantised, to ``dtype``.
        """
        copy = self.cache.index_select(0, blocks)
        if self.scales_zeros is None:
            return copy
        scales = self.scales_zeros
        if is_scaled_by_token(self.quant_bits):
            scales = scales.index_select(0, blocks)
        return dequantise(copy, self.quant_bits, scales, dtype)
