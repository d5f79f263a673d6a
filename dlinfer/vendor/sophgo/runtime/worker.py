"""A worker process: start it, call it, and end it when its last user is gone.

On bad input BMRuntime and the chip emulators crash their process (an assertion, a segmentation fault), or they hang.
Therefore they run in a worker process, and only the worker ends. The caller gets an error with the last lines that the
worker printed, and the next engine starts another worker."""

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from dlinfer import settings
from dlinfer.toolchain import starter
from dlinfer.vendor.sophgo.errors import SophgoRuntimeError, SophgoTimeoutError, SophgoWorkerError
from dlinfer.vendor.sophgo.runtime.child import wire

SHARED_BYTES = 16 * 2**20
_PATIENCE = 10.0  # seconds for a worker to close its devices and end
_LOG_BYTES = 4096

# Imports the package ``child`` by its own name: as a part of dlinfer it would import torch.
_START = "import sys; sys.path.append(sys.argv.pop(1)); from child.serve import main; main()"


class Worker:
    """One worker process. Threads that call it take turns. Only the process that started it may use it.

    name: the chip's name, for messages.
    folder: the folder of the C libraries.
    restless: whether its emulator takes a whole CPU core while it waits. If so, SIGSTOP stops the worker between calls.
    If the process that started the worker ends, even by SIGKILL, the kernel kills the worker.
    Raises SophgoWorkerError if no process can be started.
    Raises SophgoRuntimeError if the C libraries cannot be loaded."""

    def __init__(self, name: str, folder: Path, emulated: bool, restless: bool = False) -> None:
        self.name = name
        self.without_shim = ""  # why an emulator has no shim (emulator.py); empty if it has one
        self._restless = restless
        self._lock = threading.Lock()
        self._unwanted: deque[tuple[str, int]] = deque()
        self._owner = os.getpid()
        self._death = ""
        try:
            self._start()
        except (OSError, RuntimeError) as error:  # out of files or processes, or at the interpreter's exit
            how = f"could not be started: {error}"
            raise SophgoWorkerError(chip=name, how=how, call="start", log="") from None
        self.call("start", folder=str(folder), emulated=emulated)

    def _start(self) -> None:
        self._log, memory = memory_file(), memory_file()
        memory.truncate(SHARED_BYTES)
        self.shared = mmap.mmap(memory.fileno(), SHARED_BYTES)
        self._wire, theirs = socket.socketpair()
        self._process = starter.start(partial(_started, theirs, memory, self._log))
        self._end = weakref.finalize(self, _end, self._process, self._wire, self._log, self._owner)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the worker runs and this process may call it."""
        return not self._death and os.getpid() == self._owner and self._process.poll() is None

    def call(self, name: str, file: int | None = None, **arguments: Any) -> Any:
        """Call a function of the worker and return its result.

        file: the descriptor of an open file to send with the call.
        Raises SophgoRuntimeError if the C library refuses the call.
        Raises SophgoWorkerError if the worker has ended.
        Raises SophgoTimeoutError if the worker does not answer in DLINFER_SOPHGO_TIMEOUT seconds, and kills it."""
        with self._turn(name):
            return self._ask(name, file, arguments)

    def put(self, data: memoryview, name: str, **arguments: Any) -> None:
        """Call a function of the worker that reads ``data``, which has at most SHARED_BYTES."""
        with self._turn(name):
            self.shared[: data.nbytes] = data
            self._ask(name, None, arguments)

    def get(self, data: memoryview, name: str, **arguments: Any) -> None:
        """Call a function of the worker that fills ``data``, which has at most SHARED_BYTES."""
        with self._turn(name):
            self._ask(name, None, arguments)
            with memoryview(self.shared) as shared:
                data[:] = shared[: data.nbytes]

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """Reserve the worker for one call. Before the call, free what was discarded."""
        self._check_usable(name)  # a fork's child must not touch the shared memory, nor wait for a lock
        with self._lock:
            self._discard()
            yield

    def discard(self, call: str, number: int) -> None:
        """Free a memory or unload a model: now or, if a call is in progress, before the next call.

        call: "free" or "unload". number: that of the memory or model.
        Finalizers call this method at any moment, in any thread, even during a call. If the worker has ended,
        everything is free already."""
        self._unwanted.append((call, number))
        if self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(SophgoWorkerError, SophgoRuntimeError):
                    self._discard()
            finally:
                self._lock.release()

    def _discard(self) -> None:
        """Free the discarded memories, then unload the discarded models.

        Models come last because unloading a model ends the memory that belongs to it."""
        gone: dict[str, list[int]] = {"free": [], "unload": []}
        while self._unwanted:
            call, number = self._unwanted.popleft()
            gone[call].append(number)
        for call, numbers in gone.items():
            if numbers and self.alive:
                self._ask(call, None, {"numbers": numbers})

    def _ask(self, name: str, file: int | None, arguments: dict[str, Any]) -> Any:
        self._check_usable(name)
        self._log.truncate(0)
        self._log.seek(0)  # the worker shares this file's position
        seconds = settings.current().sophgo_timeout
        self._wire.settimeout(seconds)
        request = wire.packed({"call": name, **arguments})
        if self._restless:
            self._process.send_signal(signal.SIGCONT)
        try:
            self._wire.sendall(request)
            if file is not None:
                socket.send_fds(self._wire, [b"f"], [file])
            answer = wire.receive(self._wire)
        except TimeoutError:
            self.kill()
            self._death = f"did not answer {name!r} in {seconds:g} seconds and was killed"
            raise SophgoTimeoutError(
                chip=self.name, call=name, seconds=f"{seconds:g}", log=self._tail()
            ) from None
        except (wire.ClosedError, OSError):
            self._death = self._how_it_ended()
            raise SophgoWorkerError(chip=self.name, how=self._death, call=name, log=self._tail()) from None
        except BaseException:  # an interrupt: the next call would read this call's answer
            self.kill()
            self._death = f"was killed when {name!r} was interrupted"
            raise
        if self._restless:
            self._process.send_signal(signal.SIGSTOP)
        if "refused" in answer:
            detail = f"{answer['detail']}{self._tail()}"
            raise SophgoRuntimeError(chip=self.name, kind=answer["refused"], call=name, detail=detail)
        return answer["result"]

    def _check_usable(self, name: str) -> None:
        forked = os.getpid() != self._owner
        how = "belongs to the process that this one was forked from" if forked else self._death
        if how:
            raise SophgoWorkerError(chip=self.name, how=how, call=name, log="")

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its connection"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _tail(self) -> str:
        """Return the last lines that the worker printed in this call, as the end of a message; "" if there are none."""
        log = self._log.fileno()
        size = os.fstat(log).st_size
        data = os.pread(log, _LOG_BYTES, max(0, size - _LOG_BYTES))
        lines = [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip("\0 ")]
        return "; it printed: " + " | ".join(lines[-4:]) if lines else ""


def memory_file() -> FileIO:
    """Return a file that exists only in memory, until its last descriptor is closed. Raises OSError."""
    return FileIO(os.memfd_create("dlinfer-sophgo", os.MFD_CLOEXEC), "r+")


def _started(connection: socket.socket, memory: FileIO, log: FileIO) -> subprocess.Popen[bytes]:
    """Start the process of a worker. Close the worker's end of the socket and the memory file in this process.

    connection: the worker's end. memory: the memory that both processes share. log: receives the worker's output."""
    with connection, memory:
        numbers = connection.fileno(), memory.fileno()
        return subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                _START,
                str(Path(__file__).parent),
                *map(str, numbers),
                str(os.getpid()),
            ],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C must only reach the user's process
        )


def _end(process: subprocess.Popen[bytes], connection: socket.socket, log: FileIO, owner: int) -> None:
    """End a worker: close the socket, which lets it free everything and end; kill it if it does not end in time.

    In a process that did not start the worker, only close this process's files. owner: the process that started it."""
    with connection, log:
        if os.getpid() != owner:
            return
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # a forked child may hold this end of the socket, too
    process.send_signal(signal.SIGCONT)  # it may be stopped
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
