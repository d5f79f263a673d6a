"""Signals that a model's step begins to compute. From then on the step leaves Python's interpreter to other threads.

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
    """Make ``call`` the listener of this thread, called whenever a step begins to compute. Replaces the listener."""
    _own.call = call


def begins() -> None:
    """Send the signal that a step begins to compute on this thread."""
    _own.count += 1
    if _own.call is not None:
        _own.call()


def count() -> int:
    """Return how many steps have begun on this thread so far."""
    return _own.count
