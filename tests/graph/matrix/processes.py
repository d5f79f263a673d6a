"""Child processes of the matrices: run to the end or asked line by line, and never left behind."""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from typing import IO, Any

from tests.graph.matrix.ledger import ROOT


@dataclass(frozen=True)
class Finished:
    """How a child process ended. ``timed_out`` or a ``code`` other than 0 says that its output is not whole."""

    code: int
    timed_out: bool
    out: str
    err: str

    def trouble(self, limit: float) -> str:
        """In words why the process did not succeed; empty when it did."""
        if self.timed_out:
            return f"did not end within {limit:.0f} s"
        if self.code < 0:
            return f"died of {signal.Signals(-self.code).name}"
        if self.code:
            lines = self.err.strip().splitlines()
            return f"ended with code {self.code}: {lines[-1] if lines else 'no message'}"
        return ""


def run(command: list[str], limit: float) -> Finished:
    """Run a command with one thread and no network use; after ``limit`` seconds its process group is killed."""
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _running.add(child.pid)
    timed_out = False
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        timed_out = True
        kill_group(child.pid)
        out, err = child.communicate()
    finally:
        kill_group(child.pid)  # compile workers of a job that crashed
        _running.discard(child.pid)
    return Finished(child.returncode, timed_out, out, err)


_running: set[int] = set()


def stop_running() -> None:
    """Kill what ``run`` waits for in other threads, when the user interrupts the command."""
    for leader in list(_running):
        kill_group(leader)


def kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing of it is left


class Worker:
    """Runs ``command``; each line it is given must be answered by one line of JSON.

    command: the child. limit: seconds that an answer may take where ``ask`` is told none. lifetime: answers after
    which the child is replaced, because what is compiled in a process stays in its memory.
    """

    def __init__(self, command: list[str], limit: float, lifetime: int = 100) -> None:
        self._command = command
        self._limit = limit
        self._lifetime = lifetime
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._errors: IO[bytes] | None = None
        self._given = 0

    def ask(self, line: str, limit: float | None = None) -> dict[str, Any]:
        """The child's answer, or ``{"trouble": why}`` when it died or took too long."""
        limit = self._limit if limit is None else limit
        if self._child is None or self._given >= self._lifetime:
            self._start()
        assert self._child is not None and self._child.stdin is not None
        self._given += 1
        try:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()
            reply = self._answers.get(timeout=limit)
        except queue.Empty:
            self.close()
            return {"trouble": f"did not end within {limit:.0f} s"}
        except BrokenPipeError:
            reply = ""
        return json.loads(reply) if reply else {"trouble": self._obituary()}

    def close(self) -> None:
        """Kill the child and what it started."""
        if self._child is not None:
            kill_group(self._child.pid)
            self._child.wait()
            self._child = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _start(self) -> None:
        self.close()
        self._given = 0
        self._answers = queue.Queue()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  close() closes it
        self._child = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=_listen, args=(self._child, self._answers), daemon=True).start()

    def _obituary(self) -> str:
        assert self._child is not None and self._errors is not None
        code = self._child.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self.close()
        cause = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"{cause}: {lines[-1][:300]}" if lines else cause


def _listen(child: "subprocess.Popen[str]", answers: "queue.Queue[str]") -> None:
    assert child.stdout is not None
    for line in child.stdout:
        answers.put(line)
    answers.put("")
