"""Signals that a model's step begins to compute, and so leaves Python's interpreter to other threads.

The computing code sends the signal to the listener of its own thread. If another thread takes the interpreter before
the signal, the step has to wait.
"""

import threading
from collections.abc import Callable


class _OfThread(threading.local):
    call: Callable[[], None] | None = None
    count = 0


_own = _OfThread()


def listen(call: Callable[[], None]) -> None:
    """Make ``call``, which runs whenever a step begins to compute, the listener of this thread; replace the old one."""
    _own.call = call


def begins() -> None:
    """Send the signal that a step begins to compute on this thread."""
    _own.count += 1
    if _own.call is not None:
        _own.call()


def count() -> int:
    return _own.count
