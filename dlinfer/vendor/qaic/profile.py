"""The time of each call in a run, for ``print_profile_data``."""

import cProfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dlinfer.runtime.session.profiles import PROFILER

KEPT_RUNS = 1000
"""Only this many runs are profiled. Later runs are only timed, so that a long-lived Session does not grow."""

HEADER = "|  File-Line-Function  | |  num calls  | |  func time  | |  tot time  |"


@dataclass(frozen=True)
class CallRow:
    """A function in one profiled run: its number of calls, and its seconds without and with its callees."""

    where: tuple[str, int, str]
    calls: int
    own_seconds: float
    total_seconds: float


class Profiler:
    """Profiles one run at a time: runs of all Sessions wait for each other."""

    def __init__(self) -> None:
        self.runs: list[list[CallRow]] = []

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function and return its result. The profile of the call is appended to ``runs``."""
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
    """Return a table for each run, in the form of Qualcomm's sample output, with an empty line between lines."""
    lines: list[str] = []
    for rows in runs:
        lines.append(HEADER)
        lines += [f"{row.where} {row.calls} {row.own_seconds} {row.total_seconds}" for row in rows]
    return "\n\n".join(lines)
