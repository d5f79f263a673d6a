"""The worker's loop: one request at a time until the other side closes the wire, then everything is given back.

Requests are ``{"call": name, ...}``; the answer is ``{"result": ...}`` or ``{"refused": kind, "detail": text}``.
Bytes of tensors lie in memory that both sides have mapped, from its beginning.
"""

import ctypes
import mmap
import os
import signal
import socket
import sys
from itertools import count
from typing import Any

from . import wire
from .chip import Chip, RefusedError
from .model import Model

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Server:
    """Answers requests with a chip and its loaded models."""

    def __init__(self, connection: socket.socket, shared: mmap.mmap) -> None:
        self._connection = connection
        self._bytes = ctypes.c_char.from_buffer(shared)  # keeps the mapping
        self._shared = ctypes.addressof(self._bytes)
        self._chip: Chip | None = None
        self._models: dict[int, Model] = {}
        self._numbers = count(1)

    def run(self) -> None:
        """Answer until the other side is gone."""
        try:
            while True:
                wire.send(self._connection, self._answer(wire.receive(self._connection)))
        except (wire.ClosedError, OSError):
            pass
        finally:
            self.close()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": getattr(self, f"call_{request.pop('call')}")(**request)}
        except RefusedError as refused:
            return {"refused": refused.kind, "detail": str(refused)}
        except OSError as error:
            return {"refused": "library", "detail": str(error)}

    @property
    def chip(self) -> Chip:
        """The chip, which the first request starts."""
        assert self._chip is not None
        return self._chip

    def call_start(self, folder: str, emulated: bool) -> None:
        """Open the C libraries."""
        self._chip = Chip(folder, emulated)

    def call_open(self, device: int) -> dict[str, Any]:
        """Request a device."""
        return self.chip.open(device)

    def call_allocate(self, device: int, size: int) -> int:
        """Memory of a device."""
        return self.chip.allocate(device, size)

    def call_free(self, numbers: list[int]) -> None:
        """Give memory back."""
        for number in numbers:
            self.chip.free(number)

    def call_write(self, number: int, offset: int, size: int) -> None:
        """Shared bytes to a device."""
        self.chip.write(number, offset, self._shared, size)

    def call_read(self, number: int, offset: int, size: int) -> None:
        """A device to shared bytes."""
        self.chip.read(number, offset, self._shared, size)

    def call_copy(self, target: list[int], source: list[int], size: int) -> None:
        """One place of a device to another."""
        self.chip.copy((target[0], target[1]), (source[0], source[1]), size)

    def call_fill(self, number: int, offset: int, size: int, pattern: str) -> None:
        """A pattern, in hexadecimal digits, over memory of a device."""
        self.chip.fill(number, offset, size, bytes.fromhex(pattern))

    def call_load(
        self,
        devices: list[int],
        flags: int | None,
        working: list[int],
        weights: list[int],
        path: str | None,
        size: int,
    ) -> dict[str, Any]:
        """Load a bmodel from a file, or without a path from the file that comes behind this request."""
        data = None if path is not None else self._received_file()
        self.chip.working.expect(working, weights)
        model = Model(self.chip, devices, flags)
        try:
            if path is not None:
                model.load_file(path)
            else:
                self._load_bytes(model, data, size)
        except RefusedError:
            model.close()
            raise
        finally:
            if data is not None:
                os.close(data)
        number = next(self._numbers)
        self._models[number] = model
        return {"number": number, **model.describe()}

    def _received_file(self) -> int:
        _, files, _, _ = socket.recv_fds(self._connection, 1, 1)
        return files[0]

    @staticmethod
    def _load_bytes(model: Model, file: int | None, size: int) -> None:
        assert file is not None
        with mmap.mmap(file, size) as data:
            first = ctypes.c_char.from_buffer(data)
            model.load_bytes(ctypes.addressof(first), size)
            del first  # mmap does not close while somebody points into it

    def call_run(self, model: int, network: str, inputs: list[Any], outputs: list[Any]) -> list[list[int]]:
        """Run a network."""
        return self._models[model].run(network, inputs, outputs)

    def call_unload(self, models: list[int]) -> None:
        """Give models back."""
        for number in models:
            self._models.pop(number).close()
        if not self._models:
            self.chip.working.give_back()

    def close(self) -> None:
        """Give everything back, models first."""
        for model in self._models.values():
            model.close()
        self._models.clear()
        if self._chip is not None:
            self._chip.close()


def main() -> None:
    """Serve; the arguments are the numbers of a socket, of the shared memory, and of the parent process."""
    connection, shared, parent = map(int, sys.argv[1:4])
    libc = ctypes.CDLL(None, use_errno=True)
    _end_with(parent, libc)
    _print_at_once(libc)
    Server(socket.socket(fileno=connection), mmap.mmap(shared, 0)).run()


def _end_with(parent: int, libc: ctypes.CDLL) -> None:
    """Have the kernel end this process with its parent: also where it hangs, and where it is stopped."""
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), *map(ctypes.c_ulong, (0, 0, 0))):
        error = ctypes.get_errno()
        raise OSError(error, f"PR_SET_PDEATHSIG: {os.strerror(error)}")
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)


def _print_at_once(libc: ctypes.CDLL) -> None:
    """So that what the C library prints before it crashes is in the log."""
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 2, 0)  # 2 is _IONBF in glibc and musl
