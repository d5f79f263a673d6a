"""The memory that networks work in, where BMRuntime shares it among all networks of a device: a chip of one core.

BMRuntime (of tpu_mlir 1.30.2) gives such memory back when a later stage or bmodel needs more, or a bmodel is unloaded,
and networks that were loaded before go on working at its address, over whatever has come to lie there (weights,
commands, tensors): tests/vendor/sophgo/raw/growing_stages.py. So what was once memory for working stays that here
while any network is loaded, and is given out again when BMRuntime asks for such memory. Runs are one after the other,
which is what makes sharing right at all.
"""

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
    """handle: of the block's device. shared: whether the block is given out again; it may be weights otherwise.

    free: whether it may be given out now. Not while BMRuntime has it for the bmodel that was loaded last: one stage may
    work in several.
    """

    handle: int
    block: LargeMemory
    shared: bool
    free: bool = False


class WorkingMemory:
    """Stands between BMRuntime and bmlib's functions for memory of 64-bit sizes.

    Such memory is asked for weights too. Which is which is told by size: those of every bmodel are known before it is
    loaded (``expect``). A block whose size may be either is nobody else's, and is not given back either.
    """

    def __init__(self, bmlib: Any) -> None:
        self._bmlib = bmlib
        self._working: set[int] = set()
        self._weights: set[int] = set()
        self._kept: list[_Kept] = []
        # ctypes functions live as long as somebody holds them, and C calls these until the process ends.
        self.allocating = _ALLOCATING(self._allocate)
        self.releasing = _RELEASING(self._release)

    def expect(self, working: Collection[int], weights: Collection[int]) -> None:
        """Before a bmodel is loaded: the bytes that its stages work in, and those of its weights."""
        self._working.update(working)
        self._weights.update(weights)
        for kept in self._kept:
            kept.free = kept.shared

    def give_back(self) -> None:
        """Give all of it back: no network is loaded."""
        for kept in self._kept:
            self._bmlib.bm_free_device_u64(kept.handle, kept.block)
        self._kept.clear()

    def _allocate(self, handle: int, made: Any, size: int) -> int:
        """BMRuntime asks for no bytes when the last network that needs some is unloaded."""
        to_work_in = size == 0 or size in self._working
        shared = to_work_in and size not in self._weights
        for kept in self._kept:
            if shared and kept.free and kept.handle == handle and kept.block.size >= size:
                kept.free = False
                made[0] = LargeMemory.from_buffer_copy(kept.block)
                made[0].size = size
                return 0
        status = self._bmlib.bm_malloc_device_byte_u64(handle, made, size or _PAGE)
        if to_work_in and status == 0:
            self._kept.append(_Kept(handle, LargeMemory.from_buffer_copy(made[0]), shared))
        return status

    def _release(self, handle: int, block: Any) -> None:
        for kept in self._kept:
            if kept.block.address == block[0].address:
                kept.free = kept.shared
                return
        self._bmlib.bm_free_device_u64(handle, LargeMemory.from_buffer_copy(block[0]))
