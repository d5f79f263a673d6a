"""Profiles of runs for ``print_profile_data``: the time of each function that a run calls."""

import cProfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dlinfer.runtime.session.profiles import PROFILER

KEPT_RUNS = 1000
"""Only this many runs are profiled, so that the profiles of a long-lived Session do not fill the memory."""

HEADER = "|  File-Line-Function  | |  num calls  | |  func time  | |  tot time  |"


@dataclass(frozen=True)
class CallRow:
    """One function in a profiled run.

    where: file, line and name of the function. own_seconds, total_seconds: its time without and with the functions that
        it calls.
    """

    where: tuple[str, int, str]
    calls: int
    own_seconds: float
    total_seconds: float


class Profiler:
    """The profiles of one Session's runs. Only one run of all Sessions is profiled at a time; other runs wait."""

    def __init__(self) -> None:
        self.runs: list[list[CallRow]] = []

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function and return its result. Add the call's profile to ``runs``, up to ``KEPT_RUNS`` profiles."""
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
    """Return a table for each run, in the form of Qualcomm's sample output, where every second line is empty."""
    lines: list[str] = []
    for rows in runs:
        lines.append(HEADER)
        lines += [f"{row.where} {row.calls} {row.own_seconds} {row.total_seconds}" for row in rows]
    return "\n\n".join(lines)
