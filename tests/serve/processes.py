"""Child processes whose whole descent can be found again, wherever it has been re-parented to.

Each tree is started with a variable of its own in the environment, which every descendant inherits: unlike a parent
id, a process group or a session, no process loses it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).parents[2]
LMDEPLOY = str(Path(sys.executable).with_name("lmdeploy"))
"""The command that users type, from this environment."""

_MARK = "DLINFER_TEST_TREE"

# A tiny model gains nothing from threads, and nothing here may ask a model hub.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _hear_interrupts() -> None:
    """A shell has its background jobs ignore SIGINT, which children inherit, and a server under test then would."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class ProcessTree:
    """A command and all that it starts; leaving the ``with`` block kills what is left of it.

    Standard input comes from ``stdin``, both outputs go to one file that ``output`` reads.
    """

    def __init__(self, command: Sequence[str], stdin: str = "", **environment: str) -> None:
        _hear_interrupts()
        self._mark = uuid.uuid4().hex
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self.started = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8") as source:
            source.write(stdin)
            source.seek(0)
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | _ENVIRONMENT | environment | {_MARK: self._mark},
                stdin=source,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        while left := self.alive():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        self.process.wait()
        self._log.close()

    def output(self) -> str:
        """All that was printed so far."""
        # The children share the file's offset; reading by position leaves it alone.
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def last_line(self) -> str:
        """The last line of the output, without the pointer to the docs behind an error of dlinfer's."""
        lines = self.output().strip().splitlines()
        return next(line for line in reversed(lines) if not line.startswith("See docs/"))

    def alive(self) -> list[psutil.Process]:
        """Every process of the tree that still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:  # gone in the meantime, or another user's
                continue
        return found

    def wait(self, timeout: float) -> int:
        """Exit status of the command. Raises AssertionError, with the output, when it takes longer."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            alive = "\n".join(describe(process) for process in self.alive())
            raise AssertionError(
                f"still running after {timeout} s:\n{alive}\n{self.output()[-4000:]}"
            ) from None

    def survivors(self, grace: float = 120) -> list[str]:
        """What still runs some seconds after the command's end: a helper that was being started then imports torch
        before it can see that its parent is gone. What stays, stays for ever."""
        end = time.monotonic() + grace
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.05)
        return [describe(process) for process in left]

    def says(self, words: str, timeout: float = 300) -> None:
        """Wait until the words are printed. Raises AssertionError, with the output, when they are not."""
        end = time.monotonic() + timeout
        while True:
            over = self.process.poll() is not None or time.monotonic() > end
            if words in self.output():
                return
            assert not over, self.output()[-4000:]
            time.sleep(0.05)

    def send(self, which: signal.Signals) -> None:
        self.process.send_signal(which)


def describe(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline())
        return (
            f"{process.pid} (parent {process.ppid()}) {process.name()} {process.status()}: {command[-120:]}"
        )
    except psutil.Error:
        return f"{process.pid} (gone)"
