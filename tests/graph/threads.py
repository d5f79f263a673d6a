"""Threads that start at the same moment."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def together(count: int, work: Callable[[int], Result]) -> list[Result]:
    """What ``work(number)`` gives in each of ``count`` threads."""
    gate = threading.Barrier(count)

    def started(number: int) -> Result:
        gate.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(started, range(count)))
