"""Devices by number, and memory on them. All users of a device share it, and the last one closes it.

On a machine with chips, device n is chip n. Otherwise all numbers are devices of an emulator. The emulated kind of chip
is the first of these that exists: DLINFER_SOPHGO_EMULATE; the chip of the bmodel to load; the chip of the device that
is in use under this number; bm1684x."""

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from dlinfer import settings
from dlinfer.vendor.sophgo.errors import SophgoCallError, SophgoUnavailableError
from dlinfer.vendor.sophgo.runtime import chips, emulator
from dlinfer.vendor.sophgo.runtime.worker import SHARED_BYTES, Worker

LARGEST = 2**32 - 1  # bytes of one allocation: bmlib counts in an unsigned int
MOST_DEVICES = 256
_OTHER_CHIP = "compile the model for one of these chips, or run it on a machine with the model's chip"


@dataclass(frozen=True)
class Place:
    """Bytes on a device. number: that of a memory in the worker. offset, size: a range of bytes in that memory."""

    number: int
    offset: int
    size: int


class Device:
    """An open device. number: the caller's number for it. chip: its kind of chip. serial: its serial number or ""."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker = worker
        self.number = number
        answer = worker.call("open", device=number)
        self.chip = chips.of_chip_id(answer["chip_id"])
        self.serial: str = answer["serial"]

    def allocate(self, size: int) -> "DeviceMemory":
        """Allocate ``size`` bytes without clearing them.

        Raises SophgoRuntimeError if the device has too little memory."""
        if not 0 < size <= LARGEST:
            raise SophgoCallError(call="allocate", detail=f"{size} bytes; a tensor has 1 to {LARGEST} bytes")
        number = self.worker.call("allocate", device=self.number, size=size)
        memory = DeviceMemory(self, Place(number, 0, size), None)
        weakref.finalize(memory, self.worker.discard, "free", number).atexit = False
        return memory


class DeviceMemory:
    """Bytes on a device. All offsets and sizes are in bytes.

    keeper: an object to keep alive, such as the model that owns these bytes.
    Methods raise SophgoCallError for bytes outside this memory. Methods raise the errors of a worker."""

    def __init__(self, device: Device, place: Place, keeper: Any) -> None:
        self.device = device
        self.place = place
        self._keeper = keeper

    @property
    def size(self) -> int:
        return self.place.size

    def part(self, offset: int, size: int) -> "DeviceMemory":
        self._check("part", offset, size)
        return DeviceMemory(self.device, Place(self.place.number, self.place.offset + offset, size), self)

    def write(self, data: memoryview, offset: int = 0) -> None:
        """Copy ``data`` to the device, from ``offset`` on. data: a flat view of bytes."""
        self._transfer("write", self.device.worker.put, data, offset)

    def read(self, data: memoryview, offset: int = 0) -> None:
        """Copy from the device, from ``offset`` on, until ``data`` is full. data: a writable flat view of bytes."""
        self._transfer("read", self.device.worker.get, data, offset)

    def _transfer(self, call: str, move: Callable[..., None], data: memoryview, offset: int) -> None:
        """Copy in pieces of SHARED_BYTES, through the memory that this process shares with the worker.

        call: the worker's function. move: the Worker's ``put`` or ``get``."""
        self._check(call, offset, data.nbytes)
        for start in range(0, data.nbytes, SHARED_BYTES):
            piece = data[start : start + SHARED_BYTES]
            move(piece, call, **self._at(offset + start, piece.nbytes))

    def fill(self, pattern: bytes) -> None:
        """Fill the memory with copies of ``pattern``, which is 1, 2 or 4 bytes."""
        self.device.worker.call("fill", **self._at(0, self.size), pattern=pattern.hex())

    def copy_from(self, source: "DeviceMemory", offset: int, source_offset: int, size: int) -> None:
        """Copy ``size`` bytes from ``source`` into this memory. From another device they go through this process."""
        self._check("copy", offset, size)
        source._check("copy", source_offset, size)
        if source.device is self.device:
            target = (self.place.number, self.place.offset + offset)
            origin = (source.place.number, source.place.offset + source_offset)
            self.device.worker.call("copy", target=target, source=origin, size=size)
            return
        for start in range(0, size, SHARED_BYTES):
            data = memoryview(bytearray(min(size - start, SHARED_BYTES)))
            source.read(data, source_offset + start)
            self.write(data, offset + start)

    def _at(self, offset: int, size: int) -> dict[str, int]:
        return {"number": self.place.number, "offset": self.place.offset + offset, "size": size}

    def _check(self, call: str, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            detail = f"{size} bytes from byte {offset} on do not fit into memory of {self.size} bytes"
            raise SophgoCallError(call=call, detail=detail)


# _lock guards the tables, for moments only. _slow has a lock for each worker's key. It is held while that worker starts
# and opens devices, which takes time.
_lock = threading.RLock()
_slow: dict[str, threading.RLock] = {}
_workers = weakref.WeakValueDictionary[str, Worker]()
_devices = weakref.WeakValueDictionary[tuple[Worker, int], Device]()
_latest: dict[int, "weakref.ref[Device]"] = {}  # number -> the device that last opened a bmodel


def _forget() -> None:
    """Forget all workers and locks in a forked child.

    The workers belong to the parent, and its locks may stay locked."""
    global _lock, _slow, _workers, _devices, _latest
    _lock, _slow, _latest = threading.RLock(), {}, {}
    _workers, _devices = weakref.WeakValueDictionary(), weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_forget)


def open_device(number: int, chip: str | None = None) -> Device:
    """Return the device with this number, and open it if it is not open.

    chip: the kind of chip that a bmodel needs. It is emulated if this machine has no chips. None means any kind.
    Threads that open devices of the same kind wait for each other.
    Raises SophgoCallError for a number that is not a device number.
    Raises SophgoUnavailableError if there is neither a chip nor an emulator.
    Raises the errors of a worker."""
    number = number_of(number)
    emulate = settings.current().sophgo_emulate
    libsophon = None if emulate else chips.find().libsophon
    name = emulate or chip or _in_use(number) or chips.DEFAULT_EMULATED
    key = f"the emulator of {name}" if libsophon is None else "libsophon"
    _, device = _there(key, number)
    if device is None:
        with _lock:
            slow = _slow.setdefault(key, threading.RLock())
        with slow:
            worker, device = _there(key, number)
            worker = worker or _started(key, libsophon, name)
            device = device or Device(worker, number)
            with _lock:
                _workers[key], _devices[worker, number] = worker, device
    if chip is not None:
        with _lock:
            _latest[number] = weakref.ref(device)
    return device


def number_of(device: Any) -> int:
    """Return a device's number as an int. Raises SophgoCallError unless it is an integer below MOST_DEVICES."""
    if isinstance(device, Integral) and not isinstance(device, bool) and 0 <= int(device) < MOST_DEVICES:
        return int(device)
    raise SophgoCallError(call="device", detail=f"{device!r} is not a device number")


def _there(key: str, number: int) -> tuple[Worker | None, Device | None]:
    """Return the running worker and the device that it has opened. Each is None if there is none.

    key: the worker's key. number: the device's number."""
    with _lock:
        worker = _workers.get(key)
        if worker is None or not worker.alive:
            return None, None
        return worker, _devices.get((worker, number))


def _started(key: str, libsophon: Path | None, chip: str) -> Worker:
    if libsophon is not None:
        return Worker(key, libsophon, emulated=False)
    if chip not in chips.KINDS:
        known = ", ".join(chips.KINDS)
        raise SophgoUnavailableError(
            what=key, reason=f"there are emulators only of {known}", advice=_OTHER_CHIP
        )
    folder = emulator.folder(chip)
    lacking = emulator.without_shim(folder)  # before the worker opens the folder's libraries
    worker = Worker(key, folder, emulated=True, restless=chips.KINDS[chip].restless)
    worker.without_shim = lacking
    return worker


def _in_use(number: int) -> str | None:
    """Return the chip of the device that last opened a bmodel under this number; None if that device is gone."""
    with _lock:
        device = _latest.get(number, lambda: None)()
    return device.chip if device is not None and device.worker.alive else None
