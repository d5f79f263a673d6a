"""The moment at which a step of a model begins to compute: from then on it leaves the interpreter to other threads.

Told by what computes, on the thread that runs it, to whoever listens on that thread. Another thread that takes the
interpreter earlier keeps the step waiting for it.
"""

import threading
from collections.abc import Callable


class _OfThread(threading.local):
    call: Callable[[], None] | None = None
    told = 0


_own = _OfThread()


def listen(call: Callable[[], None]) -> None:
    """Have a call made whenever a step begins to compute on this thread, in the place of the one before."""
    _own.call = call


def begins() -> None:
    """A step begins to compute on this thread."""
    _own.told += 1
    if _own.call is not None:
        _own.call()


def told() -> int:
    """How often it was told on this thread so far."""
    return _own.told
