"""A worker process: start it, call it, and end it with its last user.

On bad input BMRuntime and the chip emulator crash their process (an assertion, a segmentation fault), or hang. In a
worker process only the worker ends. The caller gets an error with the worker's last lines of output, and the next
engine starts another worker."""

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
    """One worker process. Calls from several threads wait for each other; another process may not use it.

    name: the chip's, for messages. restless: whether its idle emulator takes a whole core; SIGSTOP then stops it
        between calls.
    If the process that started the worker ends, even by SIGKILL, the kernel kills the worker.
    Raises SophgoWorkerError if no process can start, SophgoRuntimeError if the C libraries in ``folder`` cannot be
    loaded."""

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
        """Whether this process can call the worker."""
        return not self._death and os.getpid() == self._owner and self._process.poll() is None

    def call(self, name: str, file: int | None = None, **arguments: Any) -> Any:
        """Call a function of the worker and return its result. file: descriptor of an open file to send with the call.

        Raises SophgoRuntimeError if the C library refuses, and SophgoWorkerError if the worker is gone. A worker that
        does not answer in DLINFER_SOPHGO_TIMEOUT seconds is killed: SophgoTimeoutError."""
        with self._turn(name):
            return self._ask(name, file, arguments)

    def put(self, data: memoryview, name: str, **arguments: Any) -> None:
        """Call a function that takes ``data``, at most SHARED_BYTES."""
        with self._turn(name):
            self.shared[: data.nbytes] = data
            self._ask(name, None, arguments)

    def get(self, data: memoryview, name: str, **arguments: Any) -> None:
        """Call a function that fills ``data``, at most SHARED_BYTES."""
        with self._turn(name):
            self._ask(name, None, arguments)
            with memoryview(self.shared) as shared:
                data[:] = shared[: data.nbytes]

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """Hold the worker for one call. Memory and models that were discarded are freed first."""
        self._check_usable(name)  # a fork's child must not touch the shared memory, nor wait for a lock
        with self._lock:
            self._discard()
            yield

    def discard(self, call: str, number: int) -> None:
        """Free memory or unload a model, now or, if another thread is in a call, before the next call.

        Finalizers call this at any moment, in any thread, even during a call. A dead worker has freed everything."""
        self._unwanted.append((call, number))
        if self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(SophgoWorkerError, SophgoRuntimeError):
                    self._discard()
            finally:
                self._lock.release()

    def _discard(self) -> None:
        """Free discarded memory, and unload discarded models last, since a model's memory ends with the model."""
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
        """Return the last lines that the worker printed during this call, to end a message; "" if there are none."""
        log = self._log.fileno()
        size = os.fstat(log).st_size
        data = os.pread(log, _LOG_BYTES, max(0, size - _LOG_BYTES))
        lines = [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip("\0 ")]
        return "; it printed: " + " | ".join(lines[-4:]) if lines else ""


def memory_file() -> FileIO:
    """Return a file that is in memory only, and vanishes with its last descriptor. Raises OSError."""
    return FileIO(os.memfd_create("dlinfer-sophgo", os.MFD_CLOEXEC), "r+")


def _started(connection: socket.socket, memory: FileIO, log: FileIO) -> subprocess.Popen[bytes]:
    """Start a worker's process. Closes the worker's end of the socket and the memory file in this process."""
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
    """End a worker: close the socket, so that the worker frees everything and ends; kill it if it does not.

    In a process that did not start the worker, only this process's files are closed."""
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
