"""Networks that share run-time memory may not run at once: who runs is kept for each group of them."""

import threading
from typing import Any

from dlinfer.vendor.megengine.errors import LiteBusyError

_lock = threading.Lock()


class MemoryGroup:
    """The networks of one run-time memory; a network alone is a group of one."""

    def __init__(self) -> None:
        self._shared = False
        self._running: int | None = None  # the network's handle

    def begin(self, network: int, call: str) -> None:
        """``network`` starts to run. Raises LiteBusyError where another of the group does."""
        with _lock:
            if self._shared and self._running not in (None, network):
                raise LiteBusyError(call=call)
            self._running = network

    def end(self, network: int) -> None:
        """``network`` has come to its end, or was given up."""
        with _lock:
            if self._running == network:
                self._running = None

    def join(self, call: str, other: Any) -> "MemoryGroup":
        """The group of both: ``other``'s. Raises LiteBusyError where one is running."""
        with _lock:
            if self._running is not None or other._running is not None:
                raise LiteBusyError(call=call)
            other._shared = True
            return other
