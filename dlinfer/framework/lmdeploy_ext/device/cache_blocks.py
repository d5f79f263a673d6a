"""Chooses the block sizes of the paged KV cache to suit the active vendor.

LMDeploy schedules in blocks of ``block_size`` tokens. Kernels may see each block as several smaller blocks of
``kernel_block_size`` tokens. If a vendor's graph engine supports only one block size, we set ``kernel_block_size`` to
that size. Then ``block_size`` may be any multiple of it.
"""

from typing import Any

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.devices import torch_device
from dlinfer.framework.patching import Original, replaces
from dlinfer.vendor import KVCacheLayout, activate_default

NOT_CHOSEN = -1
"""LMDeploy's default of ``kernel_block_size``. It makes LMDeploy use ``block_size`` for both sizes."""

LMDEPLOY_DEFAULT = 64
"""LMDeploy's default of ``block_size``. If the vendor's blocks are larger, this value counts as not set."""


def layout(device: str) -> KVCacheLayout:
    """Return the KV cache layout of the vendor that serves the torch device ``device``."""
    vendor = activate_default(device)
    return vendor.kv_cache_layout if vendor is not None else KVCacheLayout()


def choose(config: Any) -> None:
    """Set the block sizes of a PytorchEngineConfig in place to suit the vendor. Call this before LMDeploy's own checks.

    Raises UnsupportedFeatureError for sizes that the vendor does not support.
    """
    vendor = activate_default(torch_device(config.device_type))
    needed = vendor.kv_cache_layout.block_size if vendor is not None else None
    if vendor is None or needed is None:
        return
    if config.kernel_block_size not in (NOT_CHOSEN, needed):
        feature, advice = f"kernel_block_size={config.kernel_block_size}", f"leave it out, or use {needed}"
        raise UnsupportedFeatureError(feature=feature, where=f"vendor {vendor.name!r}", advice=advice)
    if config.block_size == LMDEPLOY_DEFAULT and needed > LMDEPLOY_DEFAULT:
        config.block_size = needed
    if config.block_size % needed:
        feature, advice = f"block_size={config.block_size}", f"use a multiple of {needed}"
        raise UnsupportedFeatureError(feature=feature, where=f"vendor {vendor.name!r}", advice=advice)
    config.kernel_block_size = needed


@replaces(
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase._adjust_block_size",
    why="sets blocks of 32 tokens for keys of 512 or more elements, to suit CUDA kernels, though the vendor may "
    "support only another size",
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


@replaces(
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase._maybe_disable_unsupported_prefix_caching",
    why="turns prefix caching off for models with a sliding window, because it drops blocks outside the window",
    when=activation.is_on,
    essential=False,
)
def _keep_prefix_caching(original: Original, self: Any, *, check_window: bool = True) -> None:
    config = self.cache_config
    if config.enable_prefix_caching and (config.window_size or 0) > 0:
        # Blocks outside the window stay, for sequences that begin alike. Attention masks by the layer's own window.
        config.window_size = -1
    original(self, check_window=check_window)
