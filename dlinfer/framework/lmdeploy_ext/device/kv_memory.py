"""Sizes the paged KV cache on our devices, and reports its size in logs and errors.

LMDeploy takes a fraction of a card's free memory, because no other process uses the card. Host memory is different:
other processes use it too, and zeroing a cache makes all its pages resident. So we size the cache ourselves, from the
free memory that the vendor reports.

On a device that uses the host's memory:

- The free memory is the memory that this process may still use by its cgroup's limit, not the free RAM of the host.
- If the user gave ``cache_max_entry_count``, the cache gets this fraction of the free memory, as on a card.
- Otherwise the cache gets ``DLINFER_CPU_KV_CACHE_GIB``.
- If that is not set either, the cache gets a quarter of the free memory, or 4 GiB if that is more, but at most half of
  the free memory.

On each of our devices:

- If the user set no size, the cache holds at most ``max_batch_size`` sequences of ``session_len`` tokens. With prefix
  caching there is no such limit, because the cache also keeps the tokens of earlier sequences.
- An explicit ``num_gpu_blocks`` is used unchanged, or refused if it exceeds the free memory.

With tp=N each rank gets 1/N of the free memory and of ``DLINFER_CPU_KV_CACHE_GIB``.
"""

import logging
from typing import Any

from dlinfer import settings
from dlinfer.errors import MemoryPlanError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.unchosen import is_given
from dlinfer.framework.patching import Original, replaces

logger = logging.getLogger("dlinfer")

_SMALLEST = 16  # blocks: LMDeploy refuses fewer, and shrinks its prefill to get that many
_GIB = 1 << 30
_ADVICE = (
    "choose num_gpu_blocks or cache_max_entry_count in PytorchEngineConfig so that the cache fits, lower "
    "max_prefill_token_num, or give the process more memory."
)


def gib(size: float) -> str:
    """Return a number of bytes as text, in GiB, or in MiB if it is small."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 100 else f"{size / (1 << 20):.2f} MiB"


@replaces(
    "lmdeploy.pytorch.utils:get_gpu_memory",
    why="asks torch.cuda how much memory is free, which only the device's vendor knows",
    when=activation.is_on,
)
def _device_memory(original: Original, device_id: int | None = None) -> tuple[int, int]:
    memory = activation.device().memory()
    return memory.available, memory.total


@replaces(
    "lmdeploy.pytorch.engine.config_builder:ConfigBuilder.build_cache_config",
    why="leaves session_len out of the cache config, though it limits how much cache sequences can use",
)
def _cache_config(original: Original, engine_config: Any) -> Any:
    cache_config = original(engine_config)
    if activation.serves(engine_config.device_type):
        cache_config.dlinfer_session_len = engine_config.session_len
    return cache_config


def _chosen_gib() -> float | None:
    """Return DLINFER_CPU_KV_CACHE_GIB; None if it is unset, or if the active device has a memory of its own."""
    return settings.current().cpu_kv_cache_gib if activation.device().memory().shared else None


def _chosen_bytes(config: Any, free: int, ranks: int) -> int | None:
    """Return the size in bytes that the user has set for each rank's KV cache; None if the user has set none.

    For the parameters see ``plan_blocks``.
    """
    if is_given(config.cache_max_entry_count):
        return int(free * config.cache_max_entry_count)
    chosen = _chosen_gib()
    return None if chosen is None else int(chosen * _GIB / ranks)


def _default_bytes(config: Any, free: int, ranks: int) -> int:
    """Return the default size in bytes of each rank's KV cache. For the parameters see ``plan_blocks``."""
    if activation.device().memory().shared:
        return min(max(4 * _GIB // ranks, free // 4), free // 2)
    return int(free * config.cache_max_entry_count)


def _useful_blocks(config: Any) -> int | None:
    """Return the largest number of KV cache blocks that sequences can use; None if there is no limit.

    config: a CacheConfig. With prefix caching there is no limit, because the blocks of ended sequences are kept.
    """
    session_len = getattr(config, "dlinfer_session_len", None)
    if session_len is None or config.enable_prefix_caching:
        return None
    # One block more for each sequence that is not aligned with blocks, and one for the token being generated.
    per_sequence = -(-session_len // config.block_size) + 2
    return max(per_sequence * config.max_batches + config.num_reserved_gpu_blocks, _SMALLEST)


def plan_blocks(config: Any, free: int, block_bytes: int, ranks: int = 1) -> int:
    """Return the number of KV cache blocks on each rank.

    config: a CacheConfig. free: bytes that each rank may still allocate. block_bytes: size of one block, summed over
    all layers. ranks: the number of tensor-parallel processes, which share the host's memory.
    """
    if config.num_gpu_blocks:
        return config.num_gpu_blocks
    chosen = _chosen_bytes(config, free, ranks)
    if chosen is not None:
        return chosen // block_bytes
    blocks, useful = _default_bytes(config, free, ranks) // block_bytes, _useful_blocks(config)
    return blocks if useful is None else min(blocks, useful)


def _of_first_rank(executor: Any, sizes: Any) -> int:
    """Return the size in bytes of one KV cache block on the first rank. sizes: LMDeploy's ``cache_block_sizes``."""
    return executor._get_rank_cache_block_sizes(sizes)[0]


@replaces(
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase._update_num_gpu_blocks",
    why="takes a fraction of the free memory, as if no other process used it, and never checks that an explicit "
    "num_gpu_blocks fits",
)
def _update_num_gpu_blocks(
    original: Original, self: Any, free_mems: list[int], cache_block_sizes: Any, spec_cache_config: Any
) -> None:
    if not activation.serves(self.device_type):
        original(self, free_mems, cache_block_sizes, spec_cache_config)
        return
    config, free = self.cache_config, min(free_mems)
    block_bytes = _of_first_rank(self, cache_block_sizes)
    option, blocks = _size_option(config), plan_blocks(config, free, block_bytes, len(free_mems))
    size = gib(blocks * block_bytes)
    if blocks < _SMALLEST or blocks * block_bytes > free:
        asked = f"{option} ({size}; a cache has at least {_SMALLEST} blocks)"
        raise _too_large(asked, blocks, block_bytes, free)
    config.num_gpu_blocks = blocks
    if spec_cache_config is not None:  # a draft model's cache has as many blocks as the target's
        spec_cache_config.num_gpu_blocks = blocks
    if description := activation.device().description():
        logger.info("device %s: %s", self.device_type, description)
    logger.info(
        "KV cache: %d blocks of %d tokens take %s of the %s that this process may still use, by %s. To change it: "
        "cache_max_entry_count (a fraction) or num_gpu_blocks in PytorchEngineConfig%s.",
        blocks,
        config.block_size,
        size,
        gib(free),
        option,
        _or_setting(),
    )


def _size_option(config: Any) -> str:
    """Return the option that decides the size of the KV cache, with its value, as text. config: a CacheConfig."""
    if config.num_gpu_blocks:
        return f"num_gpu_blocks={config.num_gpu_blocks}"
    fraction, chosen = config.cache_max_entry_count, _chosen_gib()
    if is_given(fraction):
        return f"cache_max_entry_count={fraction}"
    if chosen is not None:
        return f"DLINFER_CPU_KV_CACHE_GIB={chosen:g}"
    return (
        "default"
        if activation.device().memory().shared
        else f"the default cache_max_entry_count={float(fraction)}"
    )


def _or_setting() -> str:
    return ", or DLINFER_CPU_KV_CACHE_GIB" if activation.device().memory().shared else ""


@replaces(
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase._reserve_runtime_mem",
    why="reports 'No enough gpu memory' without a number",
)
def _reserve_runtime_mem(
    original: Original, self: Any, free_mems: list[int], cache_block_sizes: Any, spec_cache_config: Any
) -> list[int]:
    try:
        return original(self, free_mems, cache_block_sizes, spec_cache_config)
    except RuntimeError as cause:
        if not activation.serves(self.device_type) or "No enough gpu memory" not in str(cause):
            raise
        fraction = f"cache_max_entry_count={self.cache_config.cache_max_entry_count}"
        asked = f"{fraction} leaves no room beside the buffers of one prefill: the smallest cache"
        raise _too_large(asked, _SMALLEST, _of_first_rank(self, cache_block_sizes), min(free_mems)) from cause


SESSION_LIMIT = "_dlinfer_longest_session"
"""Attribute that we add to PytorchEngineConfig: the most tokens that session_len and the KV cache allow a session."""

_longest_session: int | None = None


def longest_session() -> int | None:
    """Return the most tokens that a session of this process's engine may have, if the KV cache limits it; else None."""
    return _longest_session


@replaces(
    "lmdeploy.pytorch.engine.engine:Engine._get_max_session_len",
    why="silently lowers session_len to what the KV cache holds, and later errors call this limit the model's "
    "context length",
    essential=False,
)
def _session_len(original: Original, self: Any) -> int:
    global _longest_session
    longest, asked = original(self), self.scheduler_config.max_session_len
    if not activation.serves(self.engine_config.device_type):
        return longest
    setattr(self.engine_config, SESSION_LIMIT, longest)  # the server's process gets a copy of the config
    is_shorter = asked is not None and longest < asked
    _longest_session = longest if is_shorter else None
    if is_shorter:
        logger.warning(
            "sessions may have at most %d tokens, not the %d of session_len, because the KV cache holds no more. For "
            "longer sessions raise num_gpu_blocks or cache_max_entry_count in PytorchEngineConfig%s.",
            longest,
            asked,
            _or_setting(),
        )
    return longest


def _too_large(asked: str, blocks: int, block_bytes: int, free: int) -> MemoryPlanError:
    return MemoryPlanError(
        asked=asked,
        blocks=blocks,
        block_bytes=gib(block_bytes),
        available=gib(free),
        limit=activation.device().memory().source,
        advice=_ADVICE,
    )
