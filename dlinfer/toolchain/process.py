"""Run a vendor's program, such as a compiler or an installer, and end it together with all processes that it started.

A program runs in its own process group, so that Ctrl-C reaches only the caller. The program and all processes that it
started are killed in these cases: at the time limit, when the caller is interrupted, by ``Stop``, and when the caller
ends. To notice the caller's end, the script ``supervisor.py`` runs between the caller and the program.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic

from dlinfer.toolchain import starter

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_BEAT = 1.0
"""The number of seconds between two calls of ``beat``."""
_LINGER = 5.0
"""Seconds to wait for output after the program's end, because a process that left the group may hold the pipe open."""
_KEPT = 40
"""The number of the last output lines of a program that are kept."""


class ProcessFailedError(Exception):
    """A program failed. The error's text says how; ``lines`` holds the program's last output lines."""

    def __init__(self, how: str, lines: Sequence[str] = ()) -> None:
        super().__init__(how)
        self.lines = tuple(lines)


class StoppedError(Exception):
    """``Stop`` ended a program, or the program was started after ``Stop.now``."""


def run(
    command: Sequence[str | Path],
    *,
    seconds: float,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    beat: Callable[[], None] | None = None,
    stop: "Stop | None" = None,
) -> list[str]:
    """Run a program to its end. Return the last lines of its output, standard error included.

    seconds: the time limit.
    folder, environment: the program's working folder and environment variables. None means the caller's.
    log: a file that gets all output as it comes.
    on_line: called with each line of output. beat: called about once a second.
    stop: lets another thread end the program.

    The program's standard input is empty. Raises ProcessFailedError if the program fails or exceeds the time limit.
    Raises StoppedError after ``stop.now``.
    """
    lines: deque[str] = deque(maxlen=_KEPT)
    late = False
    group = _Group(command, folder, environment)
    try:
        with (stop or Stop()).over(group), open(log or os.devnull, "wb") as kept:
            for line in group.lines(monotonic() + seconds, beat):
                if line is None:
                    late = True
                    break
                kept.write(line)
                text = line.decode(errors="replace").rstrip()
                if on_line is not None:
                    on_line(text)
                if text:
                    lines.append(text[:500])
    finally:
        group.kill()
        status = group.wait()
    if late:
        raise ProcessFailedError(f"it was ended after {seconds:g} s", lines)
    if status:
        how = f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"
        raise ProcessFailedError(how, lines)
    return list(lines)


def own_environment(**changes: str) -> dict[str, str]:
    """Return environment variables for another Python.

    They are this process's, except variables that select Python packages. Then ``changes`` are added.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_"))}
    return kept | changes


class Stop:
    """A switch that ends all programs that run with it. Programs that start later end at once.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[_Group] = set()
        self._stopped = False

    def now(self) -> None:
        """Kill all programs of this Stop, without waiting for their end."""
        with self._lock:
            self._stopped = True
            groups = list(self._groups)
        for group in groups:
            group.kill()

    def check(self) -> None:
        if self._stopped:
            raise StoppedError

    @contextlib.contextmanager
    def over(self, group: "_Group") -> Iterator[None]:
        """Inside the ``with`` block, ``now`` kills ``group``. Raises StoppedError if ``now`` was called."""
        with self._lock:
            self._groups.add(group)
        try:
            self.check()  # from here on, ``now`` kills the group
            yield
            self.check()
        finally:
            with self._lock:
                self._groups.discard(group)


class _Group:
    """A program and all processes that it starts. They have their own process group and session."""

    def __init__(
        self, command: Sequence[str | Path], folder: Path | None, environment: Mapping[str, str] | None
    ) -> None:
        self._lock = threading.Lock()
        self._status: int | None = None
        supervised = [sys.executable, "-I", "-S", _SUPERVISOR, str(os.getpid()), *command]

        def started() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                supervised,
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,  # the pipe's end tells the supervisor that the caller ended
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        self._process = starter.start(started)

    def lines(self, end: float, beat: Callable[[], None] | None) -> Iterator[bytes | None]:
        """Yield the output of the program, line by line, until the program ends.

        At the time limit, yield None and return.

        end: the time limit, on the clock of ``time.monotonic``. beat: called about once a second.
        """
        assert self._process.stdout is not None
        output, begun = self._process.stdout.fileno(), b""
        program = os.pidfd_open(self._process.pid)
        waits = select.poll()
        for file in (output, program):
            waits.register(file, select.POLLIN)
        left, next_beat = {output, program}, -float("inf")
        try:
            while left:
                now = monotonic()
                if now >= end:
                    yield None if program in left else begun
                    return
                if beat is not None and now >= next_beat:
                    beat()
                    next_beat = now + _BEAT
                for file, _ in waits.poll(1000 * min(_BEAT, end - now)):
                    data = os.read(file, 1 << 16) if file == output else b""
                    if not data:
                        waits.unregister(file)
                        left.remove(file)
                    if file == program:
                        self.kill()  # the processes that the program left behind
                        end = min(end, monotonic() + _LINGER)
                    *whole, begun = (begun + data).split(b"\n")
                    yield from (line + b"\n" for line in whole)
            if begun:
                yield begun
        finally:
            os.close(program)

    def kill(self) -> None:
        """Kill the whole group.

        After ``wait``, do nothing, because the group's id may belong to other processes by then.
        """
        with self._lock:
            if self._status is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the program and return its exit status, or the negative number of the signal that ended it."""
        with self._lock:
            if self._status is None:
                self._status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return self._status
