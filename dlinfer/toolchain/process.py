"""Running a vendor's program: a compiler, a builder, an installer. One way to start it, and one way to end it.

A program runs in a group of processes of its own, so that Ctrl-C is for its caller. The program and everything
that it has started end at the time limit, when the caller is interrupted, after ``Stop``, and when the caller ends.
``supervisor.py`` runs in between and watches for the caller's end.
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
"""Seconds between two beats."""
_LINGER = 5.0
"""Seconds that output is waited for that a process holds open which has left the group of a program that has ended."""
_KEPT = 40
"""Lines that are kept of a program's output."""


class ProcessFailedError(Exception):
    """A program did not succeed; its text says how, and ``lines`` what it printed last."""

    def __init__(self, how: str, lines: Sequence[str] = ()) -> None:
        super().__init__(how)
        self.lines = tuple(lines)


class StoppedError(Exception):
    """``Stop`` has ended a program, or kept it from starting."""


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
    """Run a program to its end; gives the last lines of what it printed, standard error among it.

    seconds: the time limit. folder, environment: to run it in; None means the caller's.
    log: a file that receives all output as it comes. on_line: called with each line. beat: called about once a second.
    Its standard input is empty. Raises ProcessFailedError, and StoppedError after ``stop``.
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
    """The caller's environment for a program of another Python: without what leads that to the caller's packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_"))}
    return kept | changes


class Stop:
    """Ends all programs that were started with it, from any thread, and lets none start after that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[_Group] = set()
        self._stopped = False

    def now(self) -> None:
        """End them; does not wait until they are gone."""
        with self._lock:
            self._stopped = True
            groups = list(self._groups)
        for group in groups:
            group.kill()

    def check(self) -> None:
        """Raise StoppedError after ``now``."""
        if self._stopped:
            raise StoppedError

    @contextlib.contextmanager
    def over(self, group: "_Group") -> Iterator[None]:
        """Holds a group while it runs."""
        with self._lock:
            self._groups.add(group)
        try:
            self.check()  # whoever stops from here on sees the group
            yield
            self.check()
        finally:
            with self._lock:
                self._groups.discard(group)


class _Group:
    """A program with all that it starts, in a session of its own."""

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
                stdin=subprocess.PIPE,  # its end tells the supervisor that the caller is gone
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        self._process = starter.start(started)

    def lines(self, end: float, beat: Callable[[], None] | None) -> Iterator[bytes | None]:
        """Return what it prints, line by line, until it has ended; None, and nothing more, at the time ``end``."""
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
                        self.kill()  # what it has left behind
                        end = min(end, monotonic() + _LINGER)
                    *whole, begun = (begun + data).split(b"\n")
                    yield from (line + b"\n" for line in whole)
            if begun:
                yield begun
        finally:
            os.close(program)

    def kill(self) -> None:
        """End all of it. Once it has been waited for, its number may be another's, and nothing is done."""
        with self._lock:
            if self._status is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the program and give its status: below 0 for a signal."""
        with self._lock:
            if self._status is None:
                self._status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return self._status
