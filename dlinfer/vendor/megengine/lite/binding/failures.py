"""Match the library's last error message to the failed call that caused it.

The library keeps one last message for all threads (lite/lite-c/src/global.cpp of MegEngine). A lock around each call
would end in deadlock, since calls wait for each other and call back into Python. Instead, a failed call takes the
message and clears it. If a failed call finds the message already cleared, another call failed at the same time. Both
calls then report that the message may belong to the other one. To notice this case, the call that took the message
waits a moment for calls that are still running."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_MOMENT = 0.25
"""Seconds that a failed call waits for other running calls, in case one of them fails at the same time."""


@dataclass(eq=False)
class Call:
    """One call of the library, in the thread that creates this object."""

    thread: int = field(default_factory=threading.get_ident)
    failed: bool = False  # set by the caller
    message: str = ""  # the library's
    doubtful: bool = False  # whether the message may belong to another call


class Failures:
    """The calls of the library that are running now.

    take: a function that returns the library's last message and clears it."""

    def __init__(self, take: Callable[[], str]) -> None:
        self._take = take
        self._changed = threading.Condition()  # of an RLock: a tensor's finalizer may call from inside
        self._running: set[Call] = set()
        self._last = Call()  # the last call that took a message

    @contextlib.contextmanager
    def watching(self) -> Iterator[Call]:
        """Yield a Call for one call of the library. The ``with`` block sets its ``failed``.

        If ``failed`` is True, this method sets ``message`` and ``doubtful`` at the end of the block."""
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
