"""The loops of a benchmark. Each instance has a thread, which does nothing but run inferences."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Run = Callable[[], object]


def run_loops(runs: Sequence[Run], count: int | None, seconds: float | None) -> tuple[int, float]:
    """Return the number of completed inferences, and the seconds from the first start to the last end.

    runs: for each instance, the function that runs one inference. It must release the GIL, or instances would not
        overlap. Each function runs once before the clock starts.
    count: the number of inferences of all instances together, or None.
    seconds: if ``count`` is None, no inference starts after this time.
    Raises the errors of ``runs``.
    """
    if count is not None:
        runs = runs[:count]
    for run in runs:
        run()
    if len(runs) == 1:
        start, end, done = _loop(runs[0], count, seconds)
        return done, end - start
    shares = _shares(count, len(runs))
    ready = threading.Barrier(len(runs))

    def work(run: Run, share: int | None) -> tuple[float, float, int]:
        ready.wait()
        return _loop(run, share, seconds)

    with ThreadPoolExecutor(len(runs), "qaic-benchmark") as pool:
        loops = list(pool.map(work, runs, shares))
    return sum(done for _, _, done in loops), max(end for _, end, _ in loops) - min(
        start for start, _, _ in loops
    )


def _shares(count: int | None, parts: int) -> list[int | None]:
    if count is None:
        return [None] * parts
    return [count // parts + (index < count % parts) for index in range(parts)]


def _loop(run: Run, count: int | None, seconds: float | None) -> tuple[float, float, int]:
    clock = time.perf_counter
    start = clock()
    if count is not None:
        for _ in itertools.repeat(None, count):
            run()
        return start, clock(), count
    assert seconds is not None
    stop, done, now = start + seconds, 0, start
    while now < stop:
        run()
        done += 1
        now = clock()
    return start, now, done
