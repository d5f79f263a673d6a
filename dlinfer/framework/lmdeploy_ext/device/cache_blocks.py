"""The blocks of the paged KV cache: how the active vendor lays them out, and which sizes it takes.

LMDeploy schedules in blocks of ``block_size`` tokens, each of which may be several blocks of ``kernel_block_size`` to
the kernels. A vendor whose graph engine knows one size only gets that as the second, so the first may be any multiple.
"""

from typing import Any

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.devices import torch_device
from dlinfer.framework.patching import Original, replaces
from dlinfer.vendor import KVCacheLayout, activate_default

NOT_CHOSEN = -1
"""LMDeploy's default of ``kernel_block_size``, which then becomes that of ``block_size``."""

LMDEPLOY_DEFAULT = 64
"""LMDeploy's default of ``block_size``, which counts as not chosen where the vendor's blocks are larger."""


def layout(device: str) -> KVCacheLayout:
    """The KV cache layout of the vendor that serves a device, by torch's name of it."""
    vendor = activate_default(device)
    return vendor.kv_cache_layout if vendor is not None else KVCacheLayout()


def choose(config: Any) -> None:
    """Set the ``kernel_block_size`` of a PytorchEngineConfig, before LMDeploy's own checks.

    Raises UnsupportedFeatureError for sizes that the vendor cannot take.
    """
    needed, given = layout(torch_device(config.device_type)).block_size, config.kernel_block_size
    if needed is None:
        return
    if given not in (NOT_CHOSEN, needed):
        raise _refuse(config, f"kernel_block_size={given}", f"leave it out, or use {needed}")
    if config.block_size == LMDEPLOY_DEFAULT and needed > LMDEPLOY_DEFAULT:
        config.block_size = needed
    if config.block_size % needed:
        raise _refuse(config, f"block_size={config.block_size}", f"use a multiple of {needed}")
    config.kernel_block_size = needed


def _refuse(config: Any, feature: str, advice: str) -> UnsupportedFeatureError:
    vendor = activate_default(torch_device(config.device_type))
    assert vendor is not None, "who states a block size is a vendor"
    return UnsupportedFeatureError(feature=feature, where=f"vendor {vendor.name!r}", advice=advice)


@replaces(
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase._adjust_block_size",
    why="takes blocks of 32 for keys of 512 numbers and more, as its CUDA kernels want; a vendor that states a "
    "size takes no other",
    when=activation.is_on,
    essential=False,
)
def _adjust_block_size(original: Original, self: Any) -> None:
    original(self)
    needed = layout(activation.torch_device()).block_size
    if needed is not None and self.cache_config.kernel_block_size != needed:
        self.cache_config.kernel_block_size = needed
        self.cache_config.block_size = max(self.cache_config.block_size, needed)
        self.model_config.block_size = self.cache_config.block_size
