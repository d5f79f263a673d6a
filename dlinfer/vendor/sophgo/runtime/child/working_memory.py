"""Keep the working memory of networks on a chip with one core, where all networks of a device share it.

BMRuntime (of tpu_mlir 1.30.2) frees this memory if a later stage or bmodel needs more, or if a bmodel is unloaded. But
networks that were loaded before still write to its address, where by then other content may be: weights, commands,
tensors. tests/vendor/sophgo/raw/growing_stages.py shows this. So this module keeps working memory while any network is
loaded, and reuses it when BMRuntime allocates again. Networks can share it because only one runs at a time."""

import ctypes
from collections.abc import Collection
from ctypes import POINTER, c_int, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from .layout import LargeMemory

_PAGE = 4096
_ALLOCATING = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(LargeMemory), c_uint64)
_RELEASING = ctypes.CFUNCTYPE(None, c_void_p, POINTER(LargeMemory))


@dataclass
class _Kept:
    """A block of memory that is not freed while any network is loaded.

    handle: the handle of its device.
    shared: whether networks may share the block. False if the block may hold weights.
    free: whether the next allocation may reuse the block. Blocks of the latest bmodel are not free, because one of its
        stages may need several blocks."""

    handle: int
    block: LargeMemory
    shared: bool
    free: bool = False


class WorkingMemory:
    """Replaces two functions of bmlib that BMRuntime calls: they allocate and free memory with 64-bit sizes.

    BMRuntime allocates both weights and working memory by these functions. This class tells them apart by the size of a
    block, since the sizes of a bmodel are known before it is loaded (``expect``). A block whose size could mean either
    is neither reused nor freed."""

    def __init__(self, bmlib: Any) -> None:
        self._bmlib = bmlib
        self._working: set[int] = set()
        self._weights: set[int] = set()
        self._kept: list[_Kept] = []
        # Keeps the ctypes functions alive, since C calls them until the process ends.
        self.allocating = _ALLOCATING(self._allocate)
        self.releasing = _RELEASING(self._release)

    def expect(self, working: Collection[int], weights: Collection[int]) -> None:
        """Prepare for loading a bmodel. From now on its networks may reuse kept blocks that hold no weights.

        working: the sizes in bytes of the blocks that BMRuntime may allocate as the bmodel's working memory.
        weights: the sizes in bytes of the blocks that BMRuntime may allocate for the bmodel's weights."""
        self._working.update(working)
        self._weights.update(weights)
        for kept in self._kept:
            kept.free = kept.shared

    def give_back(self) -> None:
        """Free all kept blocks. The caller must have unloaded all networks."""
        for kept in self._kept:
            self._bmlib.bm_free_device_u64(kept.handle, kept.block)
        self._kept.clear()

    def _allocate(self, handle: int, target: Any, size: int) -> int:
        """Give BMRuntime a block of ``size`` bytes, kept or new, and return a bm_status_t. target: receives the block.

        BMRuntime asks for 0 bytes when the last network that needs working memory is unloaded."""
        to_work_in = size == 0 or size in self._working
        shared = to_work_in and size not in self._weights
        for kept in self._kept:
            if shared and kept.free and kept.handle == handle and kept.block.size >= size:
                kept.free = False
                target[0] = LargeMemory.from_buffer_copy(kept.block)
                target[0].size = size
                return 0
        status = self._bmlib.bm_malloc_device_byte_u64(handle, target, size or _PAGE)
        if to_work_in and status == 0:
            self._kept.append(_Kept(handle, LargeMemory.from_buffer_copy(target[0]), shared))
        return status

    def _release(self, handle: int, block: Any) -> None:
        for kept in self._kept:
            if kept.block.address == block[0].address:
                kept.free = kept.shared
                return
        self._bmlib.bm_free_device_u64(handle, LargeMemory.from_buffer_copy(block[0]))
