"""Devices and their memory, through the C library bmlib.

dlinfer's process names each memory by a number. A place on a device is a memory's number, an offset and a size."""

import ctypes
from collections.abc import Iterable
from itertools import count
from typing import Any

from .layout import DeviceMemory
from .library import open_libraries

_SUCCESS = 0
_FAILURES = (
    *("success", "device not ready", "general failure", "time-out", "invalid parameter", "not enough memory"),
    *("data error", "device busy", "not supported yet", "not supported"),
)


class RefusedError(Exception):
    """The C library refused a call.

    kind: the part that failed, such as "memory" or "load". dlinfer's process chooses its error by it."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Memory:
    """A memory of a device. owned: True if dlinfer allocated it; False for a network's memory, which BMRuntime owns."""

    def __init__(self, device: int, block: DeviceMemory, owned: bool) -> None:
        self.device = device
        self.block = block
        self.owned = owned


class Chip:
    """The devices of this machine, or those of an emulator.

    An emulator has one real device, number 0, which can be opened many times. Each opening is a device with a number of
    its own. All of them share the emulated chip's memory, and each has its own part of it."""

    def __init__(self, folder: str, emulated: bool) -> None:
        self.bmlib, self.bmrt, self.working = open_libraries(folder)
        self.emulated = emulated
        self.handles: dict[int, int] = {}
        self.memories: dict[int, Memory] = {}
        self._numbers = count(1)

    def open(self, device: int) -> dict[str, Any]:
        """Open a device if it is not open. Return the id of its chip and its serial number. Raises RefusedError."""
        if device not in self.handles:
            self._check_number(device)
            handle = ctypes.c_void_p()
            number = 0 if self.emulated else device
            self._done("device", self.bmlib.bm_dev_request(ctypes.byref(handle), number))
            assert handle.value is not None  # success sets the handle
            self.handles[device] = handle.value
        chip, serial = ctypes.c_uint(), ctypes.create_string_buffer(256)
        self._done("device", self.bmlib.bm_get_chipid(self.handles[device], ctypes.byref(chip)))
        known = self.bmlib.bm_get_sn(self.handles[device], serial) == _SUCCESS
        return {"chip_id": chip.value, "serial": serial.value.decode(errors="replace") if known else ""}

    def _check_number(self, device: int) -> None:
        """Raise RefusedError for a device that does not exist. bmlib itself would end the process."""
        present = ctypes.c_int()
        self._done("device", self.bmlib.bm_dev_getcount(ctypes.byref(present)))
        if not self.emulated and device >= present.value:
            raise RefusedError("device", f"this machine has {present.value} devices, numbered from 0")

    def allocate(self, device: int, size: int) -> int:
        """Allocate ``size`` bytes on a device. Return the number of the memory. Raises RefusedError."""
        block = DeviceMemory()
        status = self.bmlib.bm_malloc_device_byte(self.handles[device], ctypes.byref(block), size)
        self._done("memory", status)
        return self.know(Memory(device, block, owned=True))

    def know(self, memory: Memory) -> int:
        number = next(self._numbers)
        self.memories[number] = memory
        return number

    def free(self, numbers: Iterable[int]) -> None:
        """Forget the memories with these numbers, and free those that dlinfer allocated."""
        for memory in map(self.memories.pop, numbers):
            if memory.owned:
                self.bmlib.bm_free_device(self.handles[memory.device], memory.block)

    def place(self, number: int, offset: int, size: int) -> DeviceMemory:
        block = self.memories[number].block
        return DeviceMemory(block.address + offset, block.reserved, block.dmabuf_fd, block.flags, size)

    def write(self, address: int, number: int, offset: int, size: int) -> None:
        """Copy ``size`` bytes from ``address`` in this process to a place on a device. number, offset: the place."""
        handle, place = self._at(number, offset, size)
        self._done("copy", self.bmlib.bm_memcpy_s2d_partial(handle, place, address, size))

    def read(self, address: int, number: int, offset: int, size: int) -> None:
        """Copy ``size`` bytes from a place on a device to ``address`` in this process. number, offset: the place."""
        handle, place = self._at(number, offset, size)
        self._done("copy", self.bmlib.bm_memcpy_d2s_partial(handle, address, place, size))

    def copy(self, target: tuple[int, int], source: tuple[int, int], size: int) -> None:
        """Copy ``size`` bytes between two places on one device. Each place is a memory's number and an offset.

        On an emulator the bytes go through this process, since bm1688's emulator crashes in bm_memcpy_d2d_byte."""
        if self.emulated:
            between = ctypes.create_string_buffer(size)
            self.read(ctypes.addressof(between), *source, size)
            self.write(ctypes.addressof(between), *target, size)
            return
        (handle, to), (_, origin) = self._at(*target, size), self._at(*source, size)
        self._done("copy", self.bmlib.bm_memcpy_d2d_byte(handle, to, 0, origin, 0, size))

    def fill(self, number: int, offset: int, size: int, pattern: str) -> None:
        """Fill ``size`` bytes of a memory with copies of ``pattern``: 1, 2 or 4 bytes as hexadecimal digits."""
        handle, place = self._at(number, offset, size)
        repeated = bytes.fromhex(pattern)
        value = ctypes.create_string_buffer(repeated, 4)
        self._done("copy", self.bmlib.bm_memset_device_ext(handle, value, len(repeated), place))

    def _at(self, number: int, offset: int, size: int) -> tuple[int, DeviceMemory]:
        """Return the handle of the device that has memory ``number``, and the place as bmlib's structure."""
        return self.handles[self.memories[number].device], self.place(number, offset, size)

    def close(self) -> None:
        """Free all memory and close every device. Otherwise the C library crashes when the process exits."""
        self.free(list(self.memories))
        self.working.give_back()
        for handle in self.handles.values():
            self.bmlib.bm_dev_free(handle)
        self.handles.clear()

    @staticmethod
    def _done(kind: str, status: int) -> None:
        if status != _SUCCESS:
            known = 0 < status < len(_FAILURES)
            raise RefusedError(kind, _FAILURES[status] if known else f"bm_status_t {status}")
