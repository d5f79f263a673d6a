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
_Answer = SimpleQueue["tuple[_Started | None, BaseException | None]"]
_Queue = SimpleQueue[Callable[[], None]]

_lock = threading.Lock()
_queue: _Queue | None = None


def start(job: Callable[[], _Started]) -> _Started:
    """The process that ``job`` starts, in the thread of these. Raises what ``job`` raises.

    An interrupt while it is being started is raised here, and the process ended as soon as there is one.
    """
    answer: _Answer = (
        SimpleQueue()
    )  # not a Future: an interrupt may leave that locked, and the thread waiting for it
    queue = _thread()
    try:
        queue.put(partial(_tell, job, answer))
        process, error = answer.get()
    except BaseException:
        queue.put(partial(_end_unwanted, answer))  # behind the job
        raise
    if error is not None:
        try:
            raise error
        finally:
            del error  # which has this frame
    assert process is not None
    return process


def _thread() -> _Queue:
    global _queue
    with _lock:
        if _queue is None:
            queue: _Queue = SimpleQueue()
            threading.Thread(target=_serve, args=(queue,), name="dlinfer-sophgo-starter", daemon=True).start()
            _queue = queue
        return _queue


def _serve(queue: _Queue) -> None:
    while True:
        work = queue.get()
        work()
        del work  # else what it has would live until the next


def _tell(job: Callable[[], _Started], answer: _Answer) -> None:
    try:
        answer.put((job(), None))
    except BaseException as error:  # noqa: BLE001  it is raised where the job was given
        answer.put((None, error))


def _end_unwanted(answer: _Answer) -> None:
    process = None if answer.empty() else answer.get()[0]
    if process is not None:
        process.kill()
        process.wait()


def _forget() -> None:
    """A fork's child has none of its parent's threads."""
    global _lock, _queue
    _lock, _queue = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
