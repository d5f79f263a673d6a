"""How large a block of the cache is, where layers have caches of their own: LMDeploy since 0.18."""

from functools import partial
from typing import Any

import torch
from lmdeploy.pytorch.engine.cache_engine.collector import collect_block_cache_requests
from lmdeploy.pytorch.engine.cache_engine.plan import build_block_cache_plan


def block_bytes(config: Any, cache: Any, module: torch.nn.Module) -> int:
    """Bytes of one logical block over all layers. config, cache: LMDeploy's ModelConfig and CacheConfig."""
    collect = partial(collect_block_cache_requests, module)
    return build_block_cache_plan(config, cache, 1, request_collector=collect).logical_block_nbytes
