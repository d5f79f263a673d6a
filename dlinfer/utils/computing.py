"""Tells a listener when a step of the model begins to compute in native code, so that other threads can run Python
code.

Code that computes calls ``begins``, which calls the listener of the same thread. If another thread took Python's
interpreter lock before, the step would have to wait for the lock.
"""

import threading
from collections.abc import Callable


class _OfThread(threading.local):
    call: Callable[[], None] | None = None
    count = 0


_own = _OfThread()


def listen(call: Callable[[], None]) -> None:
    """Set the listener of this thread: ``call`` runs whenever a step begins to compute.

    It replaces an earlier listener.
    """
    _own.call = call


def begins() -> None:
    """Call the listener of this thread, because a step begins to compute on it."""
    _own.count += 1
    if _own.call is not None:
        _own.call()


def count() -> int:
    return _own.count
