"""Run checks in a child process, so that a kernel that crashes or never returns fails only one check."""

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
from pathlib import Path
from typing import IO, Any

from dlinfer.conformance import here
from dlinfer.conformance import journal as kept
from dlinfer.conformance.errors import ConformanceError
from dlinfer.conformance.result import FAILED, Header, Report, Result

TIMEOUT = 600
"""The time limit of one check in seconds."""

MOST_DEATHS = 20
"""A run gives up after this many crashed processes, because each new process takes seconds to start."""

Progress = Callable[[int, int, Result], None]
"""A function of (number of results so far, number of all results, the new result)."""


def run(
    name: str,
    *,
    ops: Collection[str] = (),
    checks: Collection[str] = (),
    thorough: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
    journal: Path | None = None,
) -> Report:
    """Run checks of a vendor in child processes.

    ops, checks: the names of the ops and of the checks to run; empty for all.
    timeout: kill a child process that writes nothing for this many seconds.
    journal: a file for the results so far. If a run was interrupted, a later run with the same request, versions and
        source takes the results from the journal. The report's seconds include the time that the earlier run took for
        these results.

    Raises ConformanceError if the vendor cannot be checked at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "results") if journal is None else journal
        request = {"vendor": name, "ops": list(ops), "checks": list(checks), "thorough": thorough}
        return _Run(name, {**request, "journal": str(place.resolve())}, place, timeout, progress).report()


class _Run:
    """Starts child processes one after another until every check has run. Writes each result to the journal at once."""

    def __init__(
        self, name: str, request: dict[str, Any], journal: Path, timeout: float, progress: Progress | None
    ) -> None:
        self._name, self._request, self._timeout, self._progress = name, request, timeout, progress
        self._journal = journal
        self._key, self._results = kept.read(journal)
        self._header: Header | None = None
        self._total = self._deaths = 0

    def report(self) -> Report:
        start, earlier = time.perf_counter(), 0.0
        while self._header is None or len(self._results) < self._total:
            child = _Child(self._request, self._timeout)
            for line in child.lines():
                if "refused" in line:
                    raise ConformanceError(vendor=self._name, detail=line["refused"])
                if "header" in line:
                    spent = self._begin(line["key"])
                    earlier = spent if self._header is None else earlier
                    self._header, self._total = Header(**line["header"]), line["total"]
                if "result" in line:
                    self._found(Result(**line["result"]))
            if self._header is None:
                detail = f"the test process ended {child.how}: {child.last_words()}"
                raise ConformanceError(vendor=self._name, detail=detail)
            if child.begun is None:
                break
            self._deaths += 1
            self._found(replace(child.begun, state=FAILED, detail=f"the test process ended {child.how}"))
            if self._deaths == MOST_DEATHS:
                break
        results = [*self._results, *self._left_out(), *here.served_none(self._header, self._results)]
        return Report(self._header, results, earlier + time.perf_counter() - start)

    def _begin(self, key: str) -> float:
        """Drop all earlier results if the journal's key is not ``key``.

        Return the seconds that the remaining results took.
        """
        if key != self._key:
            self._results = []
        self._key = key
        kept.begin(self._journal, key, self._results)
        return sum(result.seconds for result in self._results)

    def _found(self, result: Result) -> None:
        self._results.append(result)
        kept.add(self._journal, result)
        if self._progress is not None:
            self._progress(len(self._results), self._total, result)

    def _left_out(self) -> list[Result]:
        left = self._total - len(self._results)
        if not left:
            return []
        why = (
            f"the test process ended {self._deaths} times" if self._deaths else "the test process ended early"
        )
        return [Result("", "", "", "claim", FAILED, f"{left} checks did not run: {why}")]


class _Child:
    """A process that runs checks.

    begun: the check that runs at the moment; None between checks. how: a text that says how the process ended.
    """

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
        """Yield the child's output lines until the child ends. Kill it if it writes nothing for ``timeout`` seconds."""
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
                    self.how = f"because dlinfer killed it after {self._timeout:g} seconds without an answer"
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
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


def _described(status: int) -> str:
    if status >= 0:
        return f"with status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"
