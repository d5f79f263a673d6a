"""The worker's loop: it answers one request at a time until dlinfer's process closes the socket, then frees everything.

A request is ``{"call": name, ...}``. Its answer is ``{"result": ...}`` or ``{"refused": kind, "detail": text}``. The
data of tensors lies at the start of a memory that both processes have mapped."""

import ctypes
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from . import wire
from .chip import Chip, RefusedError
from .model import Model

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Server:
    """Answers requests. It has the chip and the loaded models."""

    def __init__(self, connection: socket.socket, shared: mmap.mmap) -> None:
        self._connection = connection
        self._bytes = ctypes.c_char.from_buffer(shared)  # keeps the mapping alive
        self._chip: Chip | None = None
        self._models: dict[int, Model] = {}
        self._numbers = count(1)
        self._calls: dict[str, Callable[..., Any]] = {"start": self._start}

    def run(self) -> None:
        """Answer requests until the socket is closed."""
        try:
            while True:
                wire.send(self._connection, self._answer(wire.receive(self._connection)))
        except (wire.ClosedError, OSError):
            pass
        finally:
            self.close()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": self._calls[request.pop("call")](**request)}
        except RefusedError as refused:
            return {"refused": refused.kind, "detail": str(refused)}
        except OSError as error:
            return {"refused": "library", "detail": str(error)}

    def _start(self, folder: str, emulated: bool) -> None:
        """Open the C libraries. This must be the first request: all other calls need the libraries."""
        self._chip = chip = Chip(folder, emulated)
        shared = ctypes.addressof(self._bytes)
        self._calls = {
            "open": chip.open,
            "allocate": chip.allocate,
            "free": chip.free,
            "write": partial(chip.write, shared),
            "read": partial(chip.read, shared),
            "copy": chip.copy,
            "fill": chip.fill,
            "load": partial(self._load, chip),
            "run": lambda model, **arguments: self._models[model].run(**arguments),
            "unload": partial(self._unload, chip),
        }

    def _load(
        self,
        chip: Chip,
        devices: list[int],
        flags: int | None,
        working: list[int],
        weights: list[int],
        path: str | None,
        size: int,
    ) -> dict[str, Any]:
        """Load a bmodel, and return its description.

        path: the bmodel's file; None means an open file, whose descriptor arrives on the socket after this request.
        size: the size in bytes of that open file.
        working, weights: the sizes in bytes of the blocks that BMRuntime will allocate as working memory and for
            weights."""
        data = None if path is not None else socket.recv_fds(self._connection, 1, 1)[1][0]
        try:
            self._check_growth(max(working, default=0))
            chip.working.expect(working, weights)
            model = Model(chip, devices, flags, max(working, default=0))
            try:
                if path is not None:
                    model.load_file(path)
                if data is not None:
                    _load_bytes(model, data, size)
            except RefusedError:
                model.close()
                raise
        finally:
            if data is not None:
                os.close(data)
        number = next(self._numbers)
        self._models[number] = model
        return {"number": number, **model.describe()}

    def _check_growth(self, needed: int) -> None:
        """Raise RefusedError if ``needed`` bytes of working memory would break a loaded network of addr_mode basic.

        The inputs and outputs of such a network are inside the working memory. BMRuntime moves this memory if a new
        network needs more of it."""
        loaded = self._models.values()
        if needed > max((model.working for model in loaded), default=0) and any(
            model.is_basic() for model in loaded
        ):
            raise RefusedError(
                "order",
                f"it needs {needed} bytes of working memory, more than the loaded networks; BMRuntime would move "
                "the memory of a loaded network of addr_mode basic, and that network would compute wrong numbers",
            )

    def _unload(self, chip: Chip, numbers: list[int]) -> None:
        for number in numbers:
            self._models.pop(number).close()
        if not self._models:
            chip.working.give_back()

    def close(self) -> None:
        """Free everything; models come first."""
        for model in self._models.values():
            model.close()
        self._models.clear()
        if self._chip is not None:
            self._chip.close()


def _load_bytes(model: Model, file: int, size: int) -> None:
    with mmap.mmap(file, size) as data:
        first = ctypes.c_char.from_buffer(data)
        model.load_bytes(ctypes.addressof(first), size)
        del first  # mmap cannot close while an object points into it


def main() -> None:
    """Run the worker.

    Its command-line arguments are the descriptors of a socket and of shared memory, and its parent's ID."""
    connection, shared, parent = map(int, sys.argv[1:4])
    libc = ctypes.CDLL(None, use_errno=True)
    _end_with(parent, libc)
    _print_at_once(libc)
    Server(socket.socket(fileno=connection), mmap.mmap(shared, 0)).run()


def _end_with(parent: int, libc: ctypes.CDLL) -> None:
    """Let the kernel kill this process when its parent ends, even if this process hangs or is stopped."""
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), *map(ctypes.c_ulong, (0, 0, 0))):
        error = ctypes.get_errno()
        raise OSError(error, f"PR_SET_PDEATHSIG: {os.strerror(error)}")
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)


def _print_at_once(libc: ctypes.CDLL) -> None:
    """Turn off the buffer of C's stdout. Then the log has everything that the C library printed before a crash."""
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 2, 0)  # 2 is _IONBF in glibc and musl
