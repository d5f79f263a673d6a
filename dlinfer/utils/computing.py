"""Tells a listener when a step of the model begins to compute in native code.

Python work of other threads delays a step until the step's native code runs without Python's interpreter lock. So the
listener starts such work only then. Code that computes calls ``begins``, which calls the listener of the same thread.
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
