"""Waiting for what must come about, however busy the machine is, and looking at processes."""

import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 300.0
"""What is waited for at most. It costs nothing where it comes about."""


def until(done: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait until ``done()``; AssertionError where it does not come to that."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def state(pid: int, thread: int | None = None) -> str:
    """The letter of proc(5) for a process or a thread of it; X where it is gone."""
    place = f"/proc/{pid}" if thread is None else f"/proc/{pid}/task/{thread}"
    try:
        return Path(f"{place}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def ended(pid: int) -> bool:
    """Whether a process runs no more; process 1 may let it lie about as a zombie."""
    return state(pid) in ("X", "Z")


def threads(pid: int) -> list[int]:
    """Numbers of a process's threads; none where it is gone."""
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def unchanged(pid: int, seconds: float = 0.5) -> bool:
    """Whether the first thread of a process sleeps, and is not woken for a while."""

    def switches() -> list[str]:
        lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
        return [line for line in lines if "ctxt_switches" in line]

    before = switches()
    time.sleep(seconds)
    return state(pid, pid) == "S" and switches() == before
