"""Find the call that the library's last error message belongs to.

The library keeps one message for all threads (lite/lite-c/src/global.cpp of MegEngine). No lock can be held meanwhile,
since calls wait for each other and call back into Python. So a failed call takes the message and clears it. If another
call has cleared it already, both failed at the same time, and both report that the message may be the other's. A call
that takes the message therefore waits a moment for calls that are still running."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_MOMENT = 0.25
"""Seconds that a failed call waits for other calls, which may have failed at the same time."""


@dataclass(eq=False)
class Call:
    """One call of the library, in the thread that created this object."""

    thread: int = field(default_factory=threading.get_ident)
    failed: bool = False  # set by the caller
    message: str = ""  # the library's
    doubtful: bool = False  # whether the message may belong to another call


class Failures:
    """The calls of the library that are running now. take: returns the library's message and clears it."""

    def __init__(self, take: Callable[[], str]) -> None:
        self._take = take
        self._changed = threading.Condition()  # of an RLock: a tensor's finalizer may call from inside
        self._running: set[Call] = set()
        self._last = Call()  # the last call that took a message

    @contextlib.contextmanager
    def watching(self) -> Iterator[Call]:
        """Wrap a call of the library. The caller sets ``failed``; if it is true, ``message`` is set afterwards."""
        call = Call()
        with self._changed:
            self._running.add(call)
        try:
            yield call
        finally:
            with self._changed:
                self._running.remove(call)
                if call.failed:
                    self._explain(call)
                self._changed.notify_all()

    def _explain(self, call: Call) -> None:
        call.message = self._take()
        if not call.message:
            self._last.doubtful = call.doubtful = True
            call.message = self._last.message
            return
        self._last = call
        others = {other for other in self._running.copy() if other.thread != call.thread}
        self._changed.wait_for(lambda: call.doubtful or not others & self._running, _MOMENT)
