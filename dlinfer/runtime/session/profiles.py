"""Profiles of runs: the time of each op, and of each Python function."""

import contextlib
import cProfile
import json
import pstats
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dlinfer.graph.ir.program import Function, Program
from dlinfer.runtime.artifact.loading import LoadedStage

PROFILED_RUNS = 10
"""Only this many runs are profiled, the first ones, because profiling makes a run several times slower."""


# --- op by op


@dataclass(frozen=True)
class OpTimes:
    """The time of one step of a run.

    name: the names of the step's results. call: the op or region that the step calls. line: the line of the model's
    source.
    """

    name: str
    call: str
    kind: str
    line: str
    seconds: float


def time_ops(stage: LoadedStage, values: Sequence[object], path: str | Path | None = None) -> list[OpTimes]:
    """Run a stage once and return the time of every step.

    A step is an op, or a region that its engine compiled as a whole.

    path: a file to write the times to, as JSON.
    """
    graph = stage.run
    rows: list[OpTimes] = []
    regions: dict[str, Function] = {
        f"region {name}": _timed(run, run.resolve, rows)
        for name, run in graph.regions.items()
        if isinstance(run, Program)
    }

    def resolve(callee: str) -> Function:
        return regions[callee] if callee in regions else graph.program.resolve(callee)

    program = _timed(graph.program, resolve, rows, untimed=regions)
    with stage.lock:
        replace(graph, program=program)(*stage.weights, *values)
    if path is not None:
        Path(path).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return rows


def _timed(
    program: Program,
    function_of: Callable[[str], Function],
    rows: list[OpTimes],
    untimed: Collection[str] = (),
) -> Program:
    """Return a copy of the program. Each step of the copy measures its time and appends it to ``rows``.

    function_of: callee of a step -> the function to call. untimed: callees whose steps are not measured.
    """
    numbered = [replace(step, callee=f"{index} {step.callee}") for index, step in enumerate(program.steps)]

    def resolve(reference: str) -> Function:
        number, _, callee = reference.partition(" ")
        step, function = program.steps[int(number)], function_of(callee)

        def call(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds = time.perf_counter() - start
            rows.append(OpTimes(", ".join(step.names), step.callee, step.kind, step.line, seconds))
            return result

        return function if callee in untimed else call

    return replace(program, steps=numbered, resolve=resolve)


# --- in Python


PROFILER = threading.Lock()
"""A profile of Python holds this lock. Since CPython 3.12, all threads of a process share one profiler."""

_HEAD = f"{'file-line-function':<72}{'num calls':>12}{'func time':>14}{'tot time':>14}"


class PythonProfiles:
    """Python profiles of the first runs. Only one run in the process is profiled at a time.

    tables: for each run, rows of (file-line-function, calls, own seconds, seconds with callees), slowest first.
    """

    def __init__(self) -> None:
        self.tables: list[list[tuple[str, int, float, float]]] = []

    @contextlib.contextmanager
    def of_run(self, enabled: bool) -> Generator[None]:
        """Profile the ``with`` block, if ``enabled`` is true and the block is one of the first runs.

        The block is not profiled while another run in this process is being profiled.
        """
        if not enabled or len(self.tables) >= PROFILED_RUNS or not PROFILER.acquire(blocking=False):
            yield
            return
        try:
            with cProfile.Profile() as profile:
                yield
            stats: Any = pstats.Stats(profile)
            rows = [
                ("-".join(map(str, place)), calls, own, total)
                for place, (_, calls, own, total, _) in stats.stats.items()
            ]
            self.tables.append(sorted(rows, key=lambda row: -row[2]))
        finally:
            PROFILER.release()

    def text(self, runs: int) -> str:
        lines: list[str] = []
        for number, rows in enumerate(self.tables[: max(0, runs)]):
            lines += [f"iteration {number}", _HEAD]
            lines += [
                f"{place[-71:]:<72}{calls:>12}{own:>14.6f}{total:>14.6f}" for place, calls, own, total in rows
            ]
        return "\n".join(lines)
