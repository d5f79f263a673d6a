"""The sizes of the KV cache's blocks follow the active vendor: what LMDeploy schedules in, what kernels see."""

from types import SimpleNamespace

import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import cache_blocks
from dlinfer.framework.lmdeploy_ext.running.backend import OpsBackend
from dlinfer.vendor import KVCacheLayout, discovery

FIXED = """
from dlinfer.vendor import KVCacheLayout, Probe, Vendor

VENDOR = Vendor(
    "acme", "cpu", "made for a test", lambda: Probe(True, ""), lambda: {},
    kv_cache_layout=KVCacheLayout("BHSD", block_size=32),
)
"""


@pytest.fixture
def fixed(plugins):
    """The vendor ``acme``, whose graph engine knows blocks of 32 only, is active."""
    plugins("acme", FIXED)
    discovery.use("acme")


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize(
    ("given", "logical"),
    [
        ({}, 64),  # LMDeploy's default
        ({"block_size": 32}, 32),
        ({"block_size": 96}, 96),
        ({"block_size": 128, "kernel_block_size": 32}, 128),
    ],
)
def test_kernels_get_the_vendor_s_block_size(given, logical):
    config = PytorchEngineConfig(device_type="cpu", max_batch_size=4, **given)
    assert (config.block_size, config.kernel_block_size) == (logical, 32)
    cache = ConfigBuilder.build_cache_config(config)
    assert (cache.block_size, cache.kernel_block_size) == (logical, 32)


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"block_size": 16}, r"block_size=16 is not supported by vendor 'acme'.*a multiple of 32"),
        ({"block_size": 128, "kernel_block_size": 64}, r"kernel_block_size=64.*leave it out, or use 32"),
    ],
)
def test_other_sizes_are_refused_by_name(given, complaint):
    with pytest.raises(UnsupportedFeatureError, match=complaint):
        PytorchEngineConfig(device_type="cpu", **given)


@pytest.mark.usefixtures("fixed")
def test_the_cache_is_laid_out_as_the_vendor_says():
    PytorchEngineConfig(device_type="cpu")
    assert OpsBackend.get_k_block_shape(32, 2, 16, None) == (2, 32, 16)  # pyright: ignore[reportArgumentType]
    assert OpsBackend.get_v_block_shape(32, 2, 16, None) == (2, 32, 16)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("given", [{}, {"block_size": 16}, {"block_size": 128, "kernel_block_size": 64}])
def test_a_vendor_that_takes_any_size_changes_nothing(plugins, given):
    discovery.use("cpu")
    config = PytorchEngineConfig(device_type="cpu", **given)
    block_size = given.get("block_size", 64)
    assert (config.block_size, config.kernel_block_size) == (
        block_size,
        given.get("kernel_block_size", block_size),
    )


def adjusted(needed, monkeypatch) -> tuple[int, int]:
    """(block_size, kernel_block_size) of an executor whose keys have 576 numbers."""
    from lmdeploy.pytorch.engine.executor.base import ExecutorBase

    PytorchEngineConfig(device_type="cpu")
    monkeypatch.setattr(cache_blocks, "layout", lambda device: KVCacheLayout(block_size=needed))
    cache = SimpleNamespace(block_size=128, kernel_block_size=128, device_type="cpu")
    model = SimpleNamespace(
        k_head_dim=576, use_flash_mla=False, block_size=128, update_cache_config_func=None
    )
    executor = SimpleNamespace(cache_config=cache, model_config=model, device_type="cpu")
    ExecutorBase._adjust_block_size(executor)  # pyright: ignore[reportArgumentType]
    assert model.block_size in (128, cache.block_size)
    return cache.block_size, cache.kernel_block_size


def test_blocks_of_wide_keys_are_the_vendor_s(monkeypatch):
    assert adjusted(None, monkeypatch) == (32, 32)
    assert adjusted(128, monkeypatch) == (128, 128)
    assert adjusted(16, monkeypatch) == (32, 16)
