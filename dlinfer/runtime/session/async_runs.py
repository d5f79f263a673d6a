"""Asynchronous runs: a queue of jobs and one worker thread, which runs the jobs in the order of their submission."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from dlinfer.runtime.session.running import Results

Run = Future[Results]


class AsyncRuns:
    """The queue of one session. Its thread starts with the first job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "dlinfer-session")
        self._pending: list[Run] = []

    def submit(self, job: Callable[[], Results]) -> Run:
        with self._lock:
            future = self._worker.submit(job)
            # Failed jobs stay until wait() has raised their error; jobs that succeeded are dropped.
            self._pending = [run for run in self._pending if not run.done() or _error_of(run) is not None]
            self._pending.append(future)
        return future

    def wait(self) -> None:
        """Wait for all jobs submitted since the last ``wait``. If any of them failed, raise the first error."""
        with self._lock:
            pending, self._pending = self._pending, []
        errors = [error for run in pending if (error := _error_of(run)) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait for all jobs and end the thread. A later job starts a new thread."""
        with self._lock:
            worker, self._worker = self._worker, ThreadPoolExecutor(1, "dlinfer-session")
        worker.shutdown(wait=True)


def _error_of(run: Run) -> BaseException | None:
    """Wait for a job and return its error. Return None if the job succeeded or was cancelled."""
    try:
        return run.exception()
    except CancelledError:
        return None
