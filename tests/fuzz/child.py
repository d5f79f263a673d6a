"""A worker process, asked with a time limit and started anew after a crash, a hang or many programs."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.caches import fresh_cache
from tests.fuzz.worker import ANSWERS

_PROGRAMS = 150  # a process is replaced after so many: what compilers keep grows
ROOT = Path(__file__).resolve().parents[2]


class Ended(Exception):
    """The process ended or did not answer in time. ``kind``: crash or hang."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Child:
    """One worker. Use it as a context manager."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.environment = environment or {}
        self._process: subprocess.Popen[str] | None = None
        self._answers = -1
        self._asked = 0
        self._buffer = b""

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a job. Raises Ended."""
        if self._process is None or self._asked >= _PROGRAMS:
            self.end()
            self._start()
            seconds += 60
        assert self._process is not None and self._process.stdin is not None
        self._asked += 1
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        return json.loads(self._line(time.monotonic() + seconds))

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._answers)
        self._process, self._asked, self._buffer = None, 0, b""

    def _start(self) -> None:
        self._answers, theirs = os.pipe()
        given = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive", ANSWERS: str(theirs)}
        given.setdefault("DLINFER_CACHE_DIR", str(fresh_cache(self.folder / "artifacts")))
        self._log = self.folder / f"worker-{os.getpid()}-{id(self):x}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker"],
                cwd=ROOT, env=given | self.environment, pass_fds=(theirs,), text=True,
                stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
        os.close(theirs)

    def _line(self, end: float) -> str:
        while b"\n" not in self._buffer:
            if not select.select([self._answers], [], [], max(end - time.monotonic(), 0))[0]:
                self.end()
                raise Ended("hang", "no answer in time")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise self._ended()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def _ended(self) -> Ended:
        assert self._process is not None
        status = self._process.wait()
        tail = self._log.read_text(errors="replace")[-3000:]
        self.end()
        return Ended("crash", f"ended with {status}: {tail}")
