"""Where a run's time goes: op by op, and in Python."""

import contextlib
import cProfile
import json
import pstats
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dlinfer.graph.ir.program import Program
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.runtime.session.running import RunningStage

PROFILED_RUNS = 10
"""How many runs are profiled from the first on; a profile makes them several times slower."""


# --- op by op


@dataclass(frozen=True)
class OpTimes:
    """One step of a run: what it gives, what it calls, of which kind it is, the model's line, and its seconds."""

    name: str
    call: str
    kind: str
    line: str
    seconds: float


def time_ops(running: RunningStage, values: Sequence[Any], path: str | Path | None = None) -> list[OpTimes]:
    """Run once with a clock around every step. An engine with an executor of its own is one step a region."""
    graph = running.loaded.run
    assert isinstance(graph, CompiledGraph)
    rows: list[OpTimes] = []
    regions = {
        name: _timed(run, rows) if isinstance(run, Program) else run for name, run in graph.regions.items()
    }
    inside = {f"region {name}" for name, run in graph.regions.items() if isinstance(run, Program)}

    def resolve(reference: str) -> Callable[..., Any]:
        kind, _, name = reference.partition(" ")
        return regions[name] if kind == "region" else graph.program.resolve(reference)

    program = _timed(replace(graph.program, resolve=resolve), rows, unless=inside)
    with running.lock:
        replace(graph, program=program)(*running.weights, *values)
    if path is not None:
        Path(path).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return rows


def _timed(program: Program, rows: list[OpTimes], unless: frozenset[str] | set[str] = frozenset()) -> Program:
    """The same program, that adds a row for each step but those that call one of ``unless``."""
    numbered = [replace(step, callee=f"{index} {step.callee}") for index, step in enumerate(program.steps)]

    def resolve(reference: str) -> Callable[..., Any]:
        number, _, callee = reference.partition(" ")
        step, function = program.steps[int(number)], program.resolve(callee)
        if callee in unless:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds = time.perf_counter() - start
            rows.append(OpTimes(", ".join(step.names), step.callee, step.kind, step.line, seconds))
            return result

        return call

    return replace(program, steps=numbered, resolve=resolve)


# --- in Python


PROFILER = threading.Lock()
"""Held by whoever profiles Python: since CPython 3.12 a process has one profiler, whatever thread it is for."""


class PythonProfiles:
    """Python's profile of the first runs, of which one at a time in the process is profiled."""

    def __init__(self) -> None:
        self.tables: list[list[tuple[str, int, float, float]]] = []

    @contextlib.contextmanager
    def of_run(self, wanted: bool) -> Generator[None]:
        """Profile a block, where it is wanted and one of the first."""
        if not wanted or len(self.tables) >= PROFILED_RUNS or not PROFILER.acquire(blocking=False):
            yield
            return
        try:
            profile = cProfile.Profile()
            profile.enable()
            try:
                yield
            finally:
                profile.disable()
            self.tables.append(_rows(profile))
        finally:
            PROFILER.release()

    def text(self, runs: int) -> str:
        """Return the profiles of the first runs as tables."""
        head = f"{'file-line-function':<72}{'num calls':>12}{'func time':>14}{'tot time':>14}"
        lines: list[str] = []
        for number, rows in enumerate(self.tables[: max(0, runs)]):
            lines += [f"iteration {number}", head]
            lines += [
                f"{place[-71:]:<72}{calls:>12}{own:>14.6f}{total:>14.6f}" for place, calls, own, total in rows
            ]
        return "\n".join(lines)


def _rows(profile: cProfile.Profile) -> list[tuple[str, int, float, float]]:
    """(file-line-function, calls, seconds in it alone, seconds in all), slowest first."""
    stats: Any = pstats.Stats(profile)
    rows = [
        (f"{file}-{line}-{function}", calls, own, total)
        for (file, line, function), (_, calls, own, total, _) in stats.stats.items()
    ]
    return sorted(rows, key=lambda row: -row[2])
