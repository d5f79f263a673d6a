"""A program with all that it starts: a group of processes that ends as one, with its caller at the latest."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class StoppedError(Exception):
    """``Stop`` has ended a program, or kept it from starting."""


class Stop:
    """Ends all programs that were started with it, from any thread, and lets none start after that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[Group] = set()
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
    def over(self, group: "Group"):
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


class Group:
    """A program in a session of its own; what it prints comes by ``output``.

    Its standard input is a pipe that nobody writes to: its end tells a program that its caller is gone.
    """

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._reaped = False
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout

    def kill(self) -> None:
        """End all of it. Once it has been waited for, its number may be another's, and nothing is done."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the program, end what it left behind, and give its status: below 0 for a signal."""
        if not self._reaped:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # its number stays its own
            self.kill()
        with self._lock:
            status = self._process.wait()
            self._reaped = True
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return status
