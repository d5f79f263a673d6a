"""The KV pool: how many blocks it has, and what swapping moves."""

import pytest
import torch

from dlinfer.errors import MemoryPlanError
from dlinfer.framework.mindie_ext.cache import CachePool, KVCacheSettings
from dlinfer.framework.mindie_ext.errors import SwapError
from dlinfer.framework.mindie_ext.model.model_info import ModelInfo

INFO = ModelInfo(torch.device("cpu"), torch.float32, 4, num_layers=2, num_kv_heads=2, head_size=8)
BLOCK = 2 * 16 * 2 * (8 + 8) * 4
"""Bytes of a block of 16 slots: layers, slots, heads, keys and values, bytes."""


def pool_of(device_blocks: int, host_blocks: int, info: ModelInfo = INFO) -> CachePool:
    settings = KVCacheSettings(
        0, info, cpu_mem=host_blocks * BLOCK, npu_mem=device_blocks * BLOCK, block_size=16
    )
    pool = CachePool(settings, torch.device("cpu"))
    pool.allocate_cpu_kvcache()
    pool.allocate_npu_kvcache()
    return pool


def numbered(pool: CachePool) -> None:
    """Write each device block's number + 1 into it; values negative."""
    for layer, (keys, values) in enumerate(pool.npu_cache):
        for block in range(keys.shape[0]):
            keys[block] = 100 * layer + block + 1
            values[block] = -(100 * layer + block + 1)


def test_blocks_are_what_fits_into_the_memory() -> None:
    settings = KVCacheSettings(0, INFO, cpu_mem=3 * BLOCK + 1, npu_mem=5 * BLOCK - 1, block_size=16)
    assert settings.cache_block_bytes == BLOCK
    assert (settings.num_npu_blocks, settings.num_cpu_blocks) == (4, 3)


def test_keys_and_values_of_different_sizes() -> None:
    info = ModelInfo(torch.device("cpu"), torch.bfloat16, 2, 1, 2, head_size=4, k_head_size=12, v_head_size=8)
    settings = KVCacheSettings(0, info, cpu_mem=0, npu_mem=1 << 20, block_size=16)
    assert settings.cache_block_bytes == 16 * 2 * (12 + 8) * 2
    keys, values = settings.shapes(3)
    assert sorted(keys) == sorted((3, 16, 2, 12))
    assert sorted(values) == sorted((3, 16, 2, 8))


def test_the_pool_allocates_what_its_settings_say() -> None:
    pool = pool_of(4, 2)
    held = sum(one.numel() * one.element_size() for layer in pool.npu_cache for one in layer)
    assert held == 4 * BLOCK
    assert len(pool.npu_cache) == len(pool.cpu_cache) == 2
    assert pool.cpu_cache[0][0].shape[0] == 2


def test_swapping_out_and_in_again_restores_every_bit() -> None:
    pool = pool_of(4, 2)
    numbered(pool)
    before = [(keys.clone(), values.clone()) for keys, values in pool.npu_cache]
    pool.swap_kvcache_method(torch.tensor([[1, 3, 0], [1, 1, 1]]))
    for keys, values in pool.npu_cache:
        keys[1], values[1], keys[3], values[3] = 0, 0, 0, 0
    pool.swap_kvcache_method([[0, 0, 3], [0, 1, 1]])
    for (keys, values), (old_keys, old_values) in zip(pool.npu_cache, before, strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)


def test_moves_happen_in_the_order_of_the_list() -> None:
    """A block is freed and filled in one call, on either side."""
    pool = pool_of(3, 1)
    numbered(pool)
    pool.swap_kvcache_method([[1, 0, 0], [0, 0, 2], [1, 1, 0], [0, 0, 0]])
    keys = pool.npu_cache[0][0]
    assert [keys[block].flatten()[0].item() for block in range(3)] == [2.0, 2.0, 1.0]
    assert pool.cpu_cache[0][0][0].flatten()[0].item() == 2.0


def test_nothing_to_move_is_no_fault() -> None:
    pool_of(2, 1).swap_kvcache_method(torch.zeros(0, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    "moves",
    [
        [[2, 0, 0]],
        [[-1, 0, 0]],
        [[0, 1, 0]],  # no host block 1
        [[1, 0, 1]],
        [[1, 4, 0]],
        [[1, -1, 0]],
        [[0, 0, 4]],
        [[1, 0, 0], [1, 1, 0]],
        [[1, 0]],
        [1, 0, 0],
        [[1.0, 0.0, 0.0]],
    ],
)
def test_a_wrong_move_is_refused_before_anything_moves(moves: list) -> None:
    pool = pool_of(4, 1)
    numbered(pool)
    before = [one.clone() for layer in (*pool.npu_cache, *pool.cpu_cache) for one in layer]
    with pytest.raises(SwapError):
        pool.swap_kvcache_method(
            [[1, 2, 0], *moves] if isinstance(moves[0], list) and len(moves[0]) == 3 else moves
        )
    after = [one for layer in (*pool.npu_cache, *pool.cpu_cache) for one in layer]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_no_block_or_more_than_there_is() -> None:
    settings = KVCacheSettings(0, INFO, cpu_mem=0, npu_mem=BLOCK - 1, block_size=16)
    with pytest.raises(MemoryPlanError, match="at least one block"):
        CachePool(settings, torch.device("cpu")).allocate_npu_kvcache()
    settings = KVCacheSettings(0, INFO, cpu_mem=1 << 50, npu_mem=1 << 50, block_size=16)
    pool = CachePool(settings, torch.device("cpu"))
    with pytest.raises(MemoryPlanError, match="npu_mem"):
        pool.allocate_npu_kvcache()
    with pytest.raises(MemoryPlanError, match="cpu_mem"):
        pool.allocate_cpu_kvcache()
    assert pool.npu_cache == pool.cpu_cache == []
