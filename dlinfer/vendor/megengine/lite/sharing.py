"""Networks that share run-time memory may not run at once: who runs is kept for each group of them."""

import contextlib
import threading
from collections.abc import Iterator

from dlinfer.vendor.megengine.errors import LiteBusyError

_lock = threading.Lock()


class MemoryGroup:
    """The networks of one run-time memory. Each network begins with a group of its own; ``joining`` makes two one."""

    def __init__(self) -> None:
        self._joined: MemoryGroup | None = None
        self._running: int | None = None  # the network's handle

    def begin(self, network: int, call: str) -> None:
        """``network`` starts to run. Raises LiteBusyError where another of the group does."""
        with _lock:
            group = self._whole()
            if group._running not in (None, network):
                raise LiteBusyError(call=call)
            group._running = network

    def end(self, network: int) -> None:
        """``network`` has come to its end, or was given up."""
        with _lock:
            group = self._whole()
            if group._running == network:
                group._running = None

    @contextlib.contextmanager
    def joining(self, call: str, other: "MemoryGroup") -> Iterator[None]:
        """Be one group with another, and with all that joined either, when the block has ended well.

        Nothing begins to run meanwhile. Raises LiteBusyError where a network of either is running.
        """
        with _lock:
            mine, others = self._whole(), other._whole()
            if mine._running is not None or others._running is not None:
                raise LiteBusyError(call=call)
            yield
            if mine is not others:
                mine._joined = others

    def _whole(self) -> "MemoryGroup":
        group = self
        while group._joined is not None:
            group = group._joined
        return group
