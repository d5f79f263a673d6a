"""The moment at which a step of the model begins to compute: from then on it leaves the interpreter to other threads.

Told by what runs compiled graphs, on the thread that runs them, to whoever listens on that thread.
"""

import threading
from collections.abc import Callable

_listeners = threading.local()


def listen(call: Callable[[], None]) -> None:
    """Have a call made whenever a step begins to compute on this thread, in the place of the one before."""
    _listeners.call = call


def begins() -> None:
    """A step begins to compute on this thread."""
    call = getattr(_listeners, "call", None)
    if call is not None:
        call()
