"""Asking a vendor in a child process, so that a kernel that ends it, or never returns, costs one check only."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import IO, Any

from dlinfer.conformance import here
from dlinfer.conformance.errors import ConformanceError
from dlinfer.conformance.result import FAILED, Header, Report, Result

TIMEOUT = 600
"""Seconds that a check may take."""

MOST_DEATHS = 20
"""After so many the rest is not asked: starting a process takes seconds."""

Progress = Callable[[int, int, Result], None]
"""Told of each result: how many there are by now, how many there will be, the result."""


def run(
    name: str,
    *,
    ops: Collection[str] = (),
    checks: Collection[str] = (),
    thorough: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> Report:
    """Ask a vendor everything, or only some ops or checks.

    Raises ConformanceError where the vendor cannot be asked at all.
    """
    start = time.perf_counter()
    request = {"vendor": name, "ops": list(ops), "checks": list(checks), "thorough": thorough}
    results: list[Result] = []
    header, total, deaths = None, 0, 0
    while header is None or len(results) < total:
        child = _Child({**request, "skip": len(results)}, timeout)
        for line in child.lines():
            if "refused" in line:
                raise ConformanceError(vendor=name, detail=line["refused"])
            if "header" in line:
                header, total = Header(**line["header"]), line["total"]
            if "result" in line:
                results.append(Result(**line["result"]))
                if progress is not None:
                    progress(len(results), total, results[-1])
        if header is None:
            raise ConformanceError(vendor=name, detail=f"its process ended {child.how}: {child.last_words()}")
        if child.begun is None:
            break
        deaths += 1
        results.append(replace(child.begun, state=FAILED, detail=f"the process ended {child.how}"))
        if progress is not None:
            progress(len(results), total, results[-1])
        if deaths == MOST_DEATHS:
            detail = (
                f"not asked: the process ended {deaths} times before, {total - len(results)} checks are left"
            )
            results.append(Result("", "", "", "claim", FAILED, detail))
            break
    results += here.served_none(header, results)
    return Report(header, results, time.perf_counter() - start)


class _Child:
    """A process that makes checks. begun: the check that it has begun and not ended; how: in what way it ended."""

    def __init__(self, request: dict[str, Any], timeout: float) -> None:
        self._timeout = timeout
        self.begun: Result | None = None
        self.how = ""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._reading, writing = os.pipe()
        command = [sys.executable, "-m", "dlinfer.conformance", str(writing), json.dumps(request)]
        self._process = subprocess.Popen(
            command, pass_fds=[writing], stdout=self._errors, stderr=self._errors, stdin=subprocess.DEVNULL
        )
        os.close(writing)

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it says, until it ends or is silent for too long."""
        rest = b""
        with os.fdopen(self._reading, "rb", buffering=0) as pipe, selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            try:
                while ready.select(self._timeout):
                    read = pipe.read(1 << 16)
                    if not read:
                        break
                    *whole, rest = (rest + read).split(b"\n")
                    for line in map(json.loads, whole):
                        self._note(line)
                        yield line
                else:
                    self._process.kill()
                    self.how = f"by us, after {self._timeout:g} seconds without an answer"
            finally:
                if sys.exc_info()[0] is not None:
                    self._process.kill()
                status = self._process.wait()
                self.how = self.how or _described(status)

    def _note(self, line: dict[str, Any]) -> None:
        if "begins" in line:
            self.begun = Result(**line["begins"])
        elif "result" in line or "done" in line:
            self.begun = None

    def last_words(self) -> str:
        """The last line that it wrote to its output."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _described(status: int) -> str:
    if status >= 0:
        return f"with status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"
