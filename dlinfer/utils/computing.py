"""Signals that a step of a model begins to compute: from then on it leaves the interpreter to other threads.

The code that computes sends the signal on its own thread to the listener of that thread. Another thread that takes
the interpreter earlier keeps the step waiting for it.
"""

import threading
from collections.abc import Callable


class _OfThread(threading.local):
    call: Callable[[], None] | None = None
    count = 0


_own = _OfThread()


def listen(call: Callable[[], None]) -> None:
    """Call a function whenever a step begins to compute on this thread; it replaces the listener before it."""
    _own.call = call


def begins() -> None:
    """A step begins to compute on this thread."""
    _own.count += 1
    if _own.call is not None:
        _own.call()


def count() -> int:
    """How many steps have begun on this thread so far."""
    return _own.count
