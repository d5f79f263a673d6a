"""Runs one behind the other in a thread of their own, in the order in which they were asked for."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any


class AsyncRuns:
    """A queue with one worker, started at the first run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._pending: list[Future[Any]] = []

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queue a job after those before it."""
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "dlinfer-session")
            future = self._worker.submit(job)
            # Those that went well need no waiting for; a failed one stays until wait() has raised its error.
            self._pending = [one for one in self._pending if not one.done() or _error_of(one) is not None]
            self._pending.append(future)
        return future

    def wait(self) -> None:
        """Wait for all jobs so far. Raises the first error that one of them ended with, once."""
        with self._lock:
            pending, self._pending = self._pending, []
        errors = [error for future in pending if (error := _error_of(future)) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait for all jobs and end the thread."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=True)


def _error_of(future: Future[Any]) -> BaseException | None:
    """What a job ended with, when it has ended; none for one that its caller has cancelled."""
    try:
        return future.exception()
    except CancelledError:
        return None
