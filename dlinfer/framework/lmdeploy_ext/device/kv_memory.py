"""Sizes the paged KV cache on our devices, and reports its size in logs and errors.

LMDeploy takes a fraction of a card's free memory, as it has the card for itself. On our devices the vendor says how
much memory is free. Host memory is shared with other processes, and zeroing a cache touches all its pages. So on a
device with shared memory:

- the free memory is what this process may still use, by its cgroup's limit, not the host's RAM;
- an explicit ``cache_max_entry_count`` is a fraction of that free memory, as on a card;
- LMDeploy's default of 0.8 means "not chosen": then the cache gets ``DLINFER_CPU_KV_CACHE_GIB``, but never more
  than half of the free memory.

On every device of ours:

- a cache that is not sized by ``num_gpu_blocks`` holds at most ``max_batch_size`` sequences of ``session_len`` tokens;
- an explicit ``num_gpu_blocks`` is used unchanged, if it fits.

With tp=N each rank has its part of the free memory and of ``DLINFER_CPU_KV_CACHE_GIB``.
"""

import logging
from typing import Any

from dlinfer import settings
from dlinfer.errors import MemoryPlanError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Original, replaces

logger = logging.getLogger("dlinfer")

LMDEPLOY_DEFAULT_FRACTION = 0.8
_SMALLEST = 16  # blocks: LMDeploy refuses fewer, and shrinks its prefill to get that many
_GIB = 1 << 30
_ADVICE = (
    "lower num_gpu_blocks or cache_max_entry_count in PytorchEngineConfig, use a smaller max_prefill_token_num, "
    "or give the process more memory."
)


def gib(size: float) -> str:
    """Return a number of bytes as text, in GiB or MiB."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 100 else f"{size / (1 << 20):.2f} MiB"


def plan_blocks(
    *, free: int, block_bytes: int, fraction: float, default_bytes: int | None, useful_blocks: int | None
) -> int:
    """Return the number of KV cache blocks.

    free: bytes this process may still allocate. block_bytes: bytes of one block over all layers. fraction: the engine's
    cache_max_entry_count. default_bytes: the budget if no fraction was chosen; None if memory is not shared.
    useful_blocks: the most blocks that can ever be filled, or None if a session may have any length.
    """
    chosen = fraction != LMDEPLOY_DEFAULT_FRACTION
    budget = free * fraction if chosen or default_bytes is None else min(default_bytes, free / 2)
    blocks = int(budget // block_bytes)
    return blocks if useful_blocks is None else min(blocks, useful_blocks)


@replaces(
    "lmdeploy.pytorch.utils:get_gpu_memory",
    why="asks torch.cuda; on a device of ours its vendor says how much is free",
    when=activation.is_on,
)
def _device_memory(original: Original, device_id: int | None = None) -> tuple[int, int]:
    memory = activation.device().memory()
    return memory.available, memory.total


@replaces(
    "lmdeploy.pytorch.engine.config_builder:ConfigBuilder.build_cache_config",
    why="the cache config does not carry session_len, which bounds the cache that can ever be used",
)
def _cache_config(original: Original, engine_config: Any) -> Any:
    cache_config = original(engine_config)
    if activation.serves(engine_config.device_type):
        cache_config.dlinfer_session_len = engine_config.session_len
    return cache_config


def _useful_blocks(cache_config: Any) -> int | None:
    session_len = getattr(cache_config, "dlinfer_session_len", None)
    if session_len is None:
        return None
    # One block more for each sequence that is not aligned with blocks, and one for the token being generated.
    per_sequence = -(-session_len // cache_config.block_size) + 2
    needed = per_sequence * cache_config.max_batches + cache_config.num_reserved_gpu_blocks
    return max(needed, _SMALLEST)


def _of_first_rank(executor: Any, sizes: Any) -> int:
    """Return the size in bytes of one KV cache block on the first rank. sizes: LMDeploy's, for each rank."""
    return executor._get_rank_cache_block_sizes(sizes)[0]


@replaces(
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase._update_num_gpu_blocks",
    why="takes a fraction of the whole memory, and an explicit block count without looking whether it fits",
)
def _update_num_gpu_blocks(
    original: Original, self: Any, free_mems: list[int], cache_block_sizes: Any, spec_cache_config: Any
) -> None:
    if not activation.serves(self.device_type):
        original(self, free_mems, cache_block_sizes, spec_cache_config)
        return
    config, free = self.cache_config, min(free_mems)
    block_bytes = _of_first_rank(self, cache_block_sizes)
    shared = activation.device().memory().shared
    blocks = config.num_gpu_blocks or plan_blocks(
        free=free,
        block_bytes=block_bytes,
        fraction=config.cache_max_entry_count,
        default_bytes=int(settings.current().cpu_kv_cache_gib * _GIB / len(free_mems)) if shared else None,
        useful_blocks=_useful_blocks(config),
    )
    size = gib(blocks * block_bytes)
    if blocks < _SMALLEST or blocks * block_bytes > free:
        fraction = f"cache_max_entry_count={config.cache_max_entry_count}"
        asked = f"{fraction} ({size}; at least {_SMALLEST} blocks are needed)"
        if config.num_gpu_blocks:
            asked = f"num_gpu_blocks={blocks} ({size})"
        raise _too_large(asked, blocks, block_bytes, free)
    config.num_gpu_blocks = blocks
    if spec_cache_config is not None:  # a draft model's cache has as many blocks as the target's
        spec_cache_config.num_gpu_blocks = blocks
    logger.info(
        "KV cache: %d blocks of %d tokens = %s of %s that this process may still use. To change it: "
        "cache_max_entry_count (a fraction, now %s%s) or num_gpu_blocks in PytorchEngineConfig%s.",
        blocks,
        config.block_size,
        size,
        gib(free),
        config.cache_max_entry_count,
        f"; {LMDEPLOY_DEFAULT_FRACTION} counts as not chosen" if shared else "",
        _or_setting(),
    )


def _or_setting() -> str:
    return ", or DLINFER_CPU_KV_CACHE_GIB" if activation.device().memory().shared else ""


@replaces(
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase._reserve_runtime_mem",
    why="says 'No enough gpu memory' without a number",
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
        asked = f"{fraction} leaves no room for the smallest cache beside the buffers of one prefill; that"
        raise _too_large(asked, _SMALLEST, _of_first_rank(self, cache_block_sizes), min(free_mems)) from cause


SESSION_LIMIT = "_dlinfer_longest_session"
"""Attribute that we add to PytorchEngineConfig: the most tokens of a session, by session_len and the KV cache."""

_longest_session: int | None = None


def longest_session() -> int | None:
    """Return the most tokens of a session in this process's engine, if the KV cache sets that limit; else None."""
    return _longest_session


@replaces(
    "lmdeploy.pytorch.engine.engine:Engine._get_max_session_len",
    why="lowers session_len to what the KV cache holds, without a word, and limits requests in words of the model's "
    "context",
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
            "the longest session is %d tokens, not the %d of session_len: the KV cache holds no more. For longer "
            "ones raise num_gpu_blocks or cache_max_entry_count in PytorchEngineConfig%s.",
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
