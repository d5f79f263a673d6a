"""One thread that starts all worker processes and lives as long as this process.

Each worker asks the kernel to kill it when its parent ends: prctl(2), PR_SET_PDEATHSIG (``child/serve.py``). For the
kernel, the parent of a worker is the thread that started it. A thread that opens an engine may end earlier than this
process, which would kill the worker. So this thread starts the workers.
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
    """Run ``job`` in the starter thread, and return the process that it starts. Raises the errors of ``job``.

    If the caller is interrupted while it waits, the interrupt is raised here, and the new process is killed.
    """
    answer = _Answer()
    queue = _thread()
    try:
        queue.put(partial(answer.make, job))
        answer.there.get()
    except BaseException:
        queue.put(answer.end)  # runs after the job
        raise
    error, answer.error = answer.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # the error refers to this frame: avoid the cycle
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
        del work  # else its objects would live until the next job


class _Answer:
    """The result of a job.

    It is no Future: an interrupt of the caller may leave a Future locked, and the starter thread would then hang.
    """

    def __init__(self) -> None:
        self.process: _Started | None = None
        self.error: BaseException | None = None
        self.there: SimpleQueue[None] = SimpleQueue()

    def make(self, job: Callable[[], _Started]) -> None:
        try:
            self.process = job()
        except BaseException as error:  # noqa: BLE001  ``start`` raises it again
            self.error = error
        self.there.put(None)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _forget() -> None:
    """Forget the starter thread. A forked child calls this, because it has none of its parent's threads."""
    global _lock, _queue
    _lock, _queue = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
