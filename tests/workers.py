"""A worker process, asked with a time limit and started anew after a crash, a hang or many jobs."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.jobs import ANSWERS

ROOT = Path(__file__).resolve().parents[1]
STARTING = 60
"""Seconds for a process to start."""


class Ended(Exception):
    """The process ended or did not answer in time. ``kind``: crash or hang."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Worker:
    """One worker. Use it as a context manager."""

    def __init__(
        self, module: str, folder: Path, environment: dict[str, str] | None = None, jobs: int = 150
    ) -> None:
        """module: what calls ``tests.jobs.answer_jobs``. folder: for its log. environment: added to this process's.
        jobs: after which a process is replaced, since what it keeps grows."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._module, self._environment, self._jobs = module, environment or {}, jobs
        self._process: subprocess.Popen[str] | None = None
        self._log = folder / f"worker-{os.getpid()}-{id(self):x}.log"
        self._answers = -1
        self._asked = 0
        self._buffer = b""

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a job. Raises Ended."""
        if self._process is None or self._asked >= self._jobs:
            self.end()
            self._start()
            seconds += STARTING
        assert self._process is not None and self._process.stdin is not None
        self._asked += 1
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        return json.loads(self._line(time.monotonic() + seconds))

    def log(self, since: int = 0) -> str:
        """What they have printed since it was so many bytes."""
        with self._log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")

    def logged(self) -> int:
        """Bytes of what this worker's processes have printed."""
        return self._log.stat().st_size if self._log.exists() else 0

    def leave(self, seconds: float) -> int:
        """Let the process end by itself, and wait so long. Gives the number of its group of processes, 0 for none."""
        if self._process is None or self._process.stdin is None:
            return 0
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.pid

    def end(self) -> None:
        """End the process and what it has started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._answers)
        self._process, self._asked, self._buffer = None, 0, b""

    def _start(self) -> None:
        self._answers, theirs = os.pipe()
        # What this process has on its path comes first: another release of LMDeploy, for one.
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        given = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "passive"}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                cwd=ROOT, env=given | self._environment | {ANSWERS: str(theirs)}, pass_fds=(theirs,), text=True,
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        os.close(theirs)

    def _line(self, end: float) -> str:
        while b"\n" not in self._buffer:
            if not select.select([self._answers], [], [], max(end - time.monotonic(), 0))[0]:
                self.end()
                raise Ended("hang", f"no answer in time: {self.log()[-3000:]}")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise self._ended()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def _ended(self) -> Ended:
        assert self._process is not None
        status = self._process.wait()
        self.end()
        return Ended("crash", f"ended with {status}: {self.log()[-3000:]}")
