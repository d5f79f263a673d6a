"""Whose message the library's last one is: it keeps one for all threads (lite/lite-c/src/global.cpp of MegEngine).

No lock can be held over a call: calls wait for each other and call back into Python. So a call that fails takes the
message and clears it. One that finds it cleared failed at the same time as the one that took it, and neither can know
whose it was; both say so. The taker waits a moment for such calls, if there are any on their way.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_MOMENT = 0.25
"""Seconds within which a call that has failed in the library has come back from it."""


@dataclass(eq=False)
class Call:
    """One call of the library, in this thread."""

    thread: int = field(default_factory=threading.get_ident)
    failed: bool = False  # set by the caller
    message: str = ""  # what the library said of it
    doubtful: bool = False  # whether that may have been said of another call


class Failures:
    """Calls of the library that are under way. take: gives the library's message and clears it."""

    def __init__(self, take: Callable[[], str]) -> None:
        self._take = take
        self._changed = threading.Condition()  # of an RLock: a tensor's end may call from inside
        self._under_way: set[Call] = set()
        self._last = Call()  # that took a message

    @contextlib.contextmanager
    def watching(self) -> Iterator[Call]:
        """Around a call; one that has failed has its message afterwards."""
        call = Call()
        with self._changed:
            self._under_way.add(call)
        try:
            yield call
        finally:
            with self._changed:
                self._under_way.remove(call)
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
        others = {one for one in self._under_way.copy() if one.thread != call.thread}
        self._changed.wait_for(lambda: call.doubtful or not others & self._under_way, _MOMENT)
