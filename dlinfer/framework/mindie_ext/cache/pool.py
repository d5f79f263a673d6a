"""The pool of KV blocks on the device and on the host, and copies between the two."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import MemoryPlanError
from dlinfer.framework.mindie_ext.cache.settings import GB, KVCacheSettings
from dlinfer.framework.mindie_ext.errors import SwapError
from dlinfer.vendor import discovery

CPU_TO_NPU, NPU_TO_CPU = 0, 1
"""MindIE's ids of the two directions of a swap."""


class CachePool:
    """A paged KV cache: the keys and values of all layers, in blocks.

    npu_cache: a pair (keys, values) for each layer, on the device. cpu_cache: the same, in host memory. Each tensor is
    [blocks, block_size, kv_heads, head_size] in the vendor's layout. If the device is the CPU, both caches lie in host
    memory; swaps still copy blocks from one to the other, to free blocks of npu_cache.
    """

    def __init__(self, kvcache_settings: KVCacheSettings, device: torch.device) -> None:
        self.kvcache_settings = kvcache_settings
        self.device = device
        self.npu_cache: list[tuple[Tensor, Tensor]] = []
        self.cpu_cache: list[tuple[Tensor, Tensor]] = []

    def allocate_npu_kvcache(self) -> None:
        """Allocate the device blocks, zeroed.

        Raises MemoryPlanError if npu_mem is less than a block or more than free memory.
        """
        settings = self.kvcache_settings
        memory = discovery.device(self.device.type).memory()
        blocks = settings.num_npu_blocks
        if blocks < 1 or blocks * settings.cache_block_bytes > memory.available:
            raise MemoryPlanError(
                asked=f"npu_mem = {settings.npu_mem / GB:.3g} GB",
                blocks=blocks,
                block_bytes=f"{settings.cache_block_bytes} bytes",
                available=f"{memory.available / GB:.3g} GB",
                limit=memory.source,
                advice="set npu_mem to at least one block, and at most the available memory",
            )
        self.npu_cache = self._allocate(blocks, self.device)

    def allocate_cpu_kvcache(self) -> None:
        """Allocate the host blocks, zeroed. A cpu_mem of 0 gives no blocks.

        Raises MemoryPlanError if memory is short.
        """
        settings = self.kvcache_settings
        host = discovery.device("cpu").memory()
        needed = settings.num_cpu_blocks * settings.cache_block_bytes
        if needed > host.available:
            raise MemoryPlanError(
                asked=f"cpu_mem = {settings.cpu_mem / GB:.3g} GB",
                blocks=settings.num_cpu_blocks,
                block_bytes=f"{settings.cache_block_bytes} bytes",
                available=f"{host.available / GB:.3g} GB",
                limit=host.source,
                advice="set a smaller cpu_mem",
            )
        self.cpu_cache = self._allocate(settings.num_cpu_blocks, torch.device("cpu"))

    def swap_kvcache_method(self, swap_decision: Tensor | Sequence[Sequence[int]]) -> None:
        """Copy blocks between device and host. Target blocks are overwritten, source blocks keep their contents.

        swap_decision: [moves, 3] integers. A move is a decision, a source block and a target block. Decision 0 copies
            from the host to the device, 1 from the device to the host.

        All moves are checked before the first copy. Copies follow the order of the moves, so one call may copy a block
        to the host and then overwrite it on the device. Consecutive moves with the same decision are copied as one, so
        each of them must have another target block.

        Raises SwapError for a malformed list, for a block that does not exist, and for a repeated target block.
        """
        dim = self.kvcache_settings.layout.order.index("B")
        for decision, moves in itertools.groupby(self._checked(swap_decision), key=lambda move: move[0]):
            to_host = decision == NPU_TO_CPU
            sources, targets = (
                (self.npu_cache, self.cpu_cache) if to_host else (self.cpu_cache, self.npu_cache)
            )
            _, read, write = torch.tensor(list(moves)).unbind(1)
            for layer_from, layer_to in zip(sources, targets, strict=True):
                for source, target in zip(layer_from, layer_to, strict=True):
                    blocks = source.index_select(dim, read.to(source.device)).to(target.device)
                    target.index_copy_(dim, write.to(target.device), blocks)

    def _checked(self, swap_decision: Any) -> list[list[int]]:
        moves = torch.as_tensor(swap_decision).cpu()
        shown = repr(moves.tolist())[:80]
        if moves.numel() == 0:
            return []
        if moves.is_floating_point() or moves.dim() != 2 or moves.shape[1] != 3:
            raise SwapError(
                decisions=shown, detail=f"it is {moves.dtype} {tuple(moves.shape)}, not [moves, 3]"
            )
        settings = self.kvcache_settings
        rows = moves.tolist()
        for decision, source, target in rows:
            if decision not in (CPU_TO_NPU, NPU_TO_CPU):
                raise SwapError(decisions=shown, detail=f"there is no decision {decision}")
            ends = (settings.num_cpu_blocks, settings.num_npu_blocks)
            sources, targets = ends if decision == CPU_TO_NPU else ends[::-1]
            if not 0 <= source < sources or not 0 <= target < targets:
                detail = f"there is no block {source} or {target} of {sources} and {targets}"
                raise SwapError(decisions=shown, detail=detail)
        for _, moves in itertools.groupby(rows, key=lambda move: move[0]):
            written = [target for _, _, target in moves]
            if len(set(written)) != len(written):
                raise SwapError(decisions=shown, detail="it writes a block twice")
        return rows

    def _allocate(self, blocks: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        keys, values = self.kvcache_settings.shapes(blocks)
        dtype = self.kvcache_settings.dtype
        return [
            (torch.zeros(keys, dtype=dtype, device=device), torch.zeros(values, dtype=dtype, device=device))
            for _ in range(self.kvcache_settings.num_layers)
        ]
