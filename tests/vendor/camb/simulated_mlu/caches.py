"""The paged cache [blocks, heads, block_size, size]: writing it, and reading a sequence of it."""

import torch
from torch import Tensor

from tests.vendor.camb.simulated_mlu import rules
from tests.vendor.camb.simulated_mlu.rules import FLOATS, require

KINDS = (*FLOATS, torch.int8)


def reshape_paged_cache(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    direction: bool,
) -> tuple[Tensor, Tensor] | Tensor:
    require(not direction, "direction=True is not simulated")
    require((v is None) is (v_cache is None), "v and v_cache: both or neither")
    rules.tensor("slot_mapping", slot_mapping, (torch.int32,), 1)
    rules.same_dtype(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    if v is not None and v_cache is not None:
        rules.shape("v", v, k.shape)
        rules.shape("v_cache", v_cache, k_cache.shape)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new is None or cache is None:
            continue
        rules.tensor(name, new, KINDS, 3)
        rules.tensor(f"{name}_cache", cache, KINDS, 4)
        blocks, heads, block_size, size = cache.shape
        rules.shape(name, new, (slot_mapping.shape[0], heads, size))
        require(bool((slot_mapping < blocks * block_size).all()), "slot_mapping: slots of the cache")
        kept = slot_mapping >= 0
        slots = slot_mapping[kept].long()
        cache[slots // block_size, :, slots % block_size] = new[kept]
        numbers, counts = slots.unique(return_counts=True)
        twice = numbers[counts > 1]  # which of two writers wins is not said
        cache[twice // block_size, :, twice % block_size] = torch.nan if cache.is_floating_point() else 77
    return k_cache if v_cache is None else (k_cache, v_cache)


def check_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    lengths: list[int],
    sizes: tuple[int, ...],
) -> None:
    """Caches and tables that an attention op reads."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        rules.tensor(name, cache, FLOATS, 4)
    rules.same_dtype(q=q, k_cache=k_cache, v_cache=v_cache)
    rules.shape("v_cache, but sizes", v_cache[..., 0], k_cache.shape[:3])
    block_size = k_cache.shape[2]
    rules.one_of("block_size", block_size, sizes)
    rules.tensor("block_tables", block_tables, (torch.int32,), 2)
    require(block_tables.shape[0] == len(lengths), f"block_tables: {len(lengths)} rows")
    require(
        max(lengths) <= block_tables.shape[1] * block_size, "block_tables: as many columns as lengths need"
    )


def pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens of a sequence, [length, heads, size]."""
    block_size = cache.shape[2]
    used = table[: -(-length // block_size)].long()
    require(bool(((used >= 0) & (used < cache.shape[0])).all()), "block_tables: blocks of the cache")
    return cache[used].transpose(1, 2).flatten(0, 1)[:length]
