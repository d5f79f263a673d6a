"""The thread that starts workers, which lives as long as this process.

A worker has the kernel end it with its parent (``child/serve.py``), and to the kernel the parent is the thread that
started it: prctl(2), PR_SET_PDEATHSIG. The threads that open engines come and go; this one ends with the process only.
"""

import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Started = subprocess.Popen[bytes]
_Queue = SimpleQueue["tuple[Future[_Started], Callable[[], _Started]]"]

_lock = threading.Lock()
_queue: _Queue | None = None


def start(job: Callable[[], _Started]) -> _Started:
    """The process that ``job`` starts, in the thread of these. Raises what ``job`` raises.

    An interrupt while it is being started is raised here, and the process ended as soon as there is one.
    """
    future: Future[_Started] = Future()
    queue = _thread()
    try:
        queue.put((future, job))  # an interrupt may come as soon as it is there
        return future.result()
    except BaseException:
        future.add_done_callback(_end_unwanted)
        raise
    finally:
        del future  # which has the error, which has this frame


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
        future, job = queue.get()
        try:
            future.set_result(job())
        except BaseException as error:  # noqa: BLE001  it is raised where the job was given
            future.set_exception(error)
        del future, job  # else the last process's would live until the next


def _end_unwanted(future: "Future[Any]") -> None:
    if future.exception() is None:
        process: _Started = future.result()
        process.kill()
        process.wait()


def _forget() -> None:
    """A fork's child has none of its parent's threads."""
    global _lock, _queue
    _lock, _queue = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
