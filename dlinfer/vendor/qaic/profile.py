"""The time of each call in a run, for ``print_profile_data``."""

import cProfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dlinfer.runtime.session.profiles import PROFILER

KEPT_RUNS = 1000
"""The most profiled runs. Later runs are only timed, so that a long-lived session does not grow."""

HEADER = "|  File-Line-Function  | |  num calls  | |  func time  | |  tot time  |"


@dataclass(frozen=True)
class CallRow:
    """One function in one run: its place, calls, seconds in itself, seconds with its callees."""

    where: tuple[str, int, str]
    calls: int
    own_seconds: float
    total_seconds: float


class Profiler:
    """Profiles one run at a time; threads of all sessions wait for each other."""

    def __init__(self) -> None:
        self.runs: list[list[CallRow]] = []

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the function's result. Its profile is appended to ``runs``."""
        with PROFILER:
            if len(self.runs) < KEPT_RUNS:
                profile = cProfile.Profile()
                result = profile.runcall(function, *arguments)
                profile.create_stats()
                self.runs.append(_rows(profile))
                return result
        return function(*arguments)


def _rows(profile: Any) -> list[CallRow]:
    rows = [CallRow(where, row[1], row[2], row[3]) for where, row in profile.stats.items()]
    # The profiler's own last call is no part of the run.
    return [row for row in rows if "_lsprof.Profiler" not in row.where[2]]


def text(runs: Sequence[Sequence[CallRow]]) -> str:
    """Return the table of each run, in the form of Qualcomm's sample output: lines with empty ones between."""
    lines: list[str] = []
    for rows in runs:
        lines.append(HEADER)
        lines += [f"{row.where} {row.calls} {row.own_seconds} {row.total_seconds}" for row in rows]
    return "\n\n".join(lines)
