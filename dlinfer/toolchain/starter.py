"""The thread that starts workers, which lives as long as this process.

A worker has the kernel end it with its parent (``child/serve.py``), and to the kernel the parent is the thread that
started it: prctl(2), PR_SET_PDEATHSIG. The threads that open engines come and go; this one ends with the process only.
"""

import os
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

_Started = subprocess.Popen[bytes]
_Queue = SimpleQueue[Callable[[], None]]

_lock = threading.Lock()
_queue: _Queue | None = None


def start(job: Callable[[], _Started]) -> _Started:
    """Return the process that ``job`` starts, in the thread of these. Raises what ``job`` raises.

    An interrupt while it is being started is raised here, and the process ended as soon as there is one.
    """
    answer = _Answer()
    queue = _thread()
    try:
        queue.put(partial(answer.make, job))
        answer.there.get()
    except BaseException:
        queue.put(answer.end)  # behind the job
        raise
    error, answer.error = answer.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # which has this frame
    assert answer.process is not None
    return answer.process


def _thread() -> _Queue:
    global _queue
    with _lock:
        if _queue is None:
            queue: _Queue = SimpleQueue()
            threading.Thread(target=_serve, args=(queue,), name="dlinfer-starter", daemon=True).start()
            _queue = queue
        return _queue


def _serve(queue: _Queue) -> None:
    while True:
        work = queue.get()
        work()
        del work  # else what it has would live until the next


class _Answer:
    """The result of a job. An interrupt may leave a Future locked while the thread waits to fill it."""

    def __init__(self) -> None:
        self.process: _Started | None = None
        self.error: BaseException | None = None
        self.there: SimpleQueue[None] = SimpleQueue()

    def make(self, job: Callable[[], _Started]) -> None:
        try:
            self.process = job()
        except BaseException as error:  # noqa: BLE001  it is raised where the job was given
            self.error = error
        self.there.put(None)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _forget() -> None:
    """A fork's child has none of its parent's threads."""
    global _lock, _queue
    _lock, _queue = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
