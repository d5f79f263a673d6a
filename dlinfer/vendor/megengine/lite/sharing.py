"""Groups of networks that share run-time memory. Only one network of a group can run at a time."""

import contextlib
import threading
from collections.abc import Iterator

from dlinfer.vendor.megengine.errors import LiteBusyError

_lock = threading.Lock()


class MemoryGroup:
    """The networks that share one run-time memory. A new network is alone in its group; ``joining`` merges two groups.

    The methods know a network by its handle, a number."""

    def __init__(self) -> None:
        self._joined: MemoryGroup | None = None
        self._running: int | None = None  # the network's handle

    def begin(self, network: int, call: str) -> None:
        """Mark ``network`` as running. Raises LiteBusyError if another network of the group runs.

        call: the API function that starts the run, for the error."""
        with _lock:
            group = self._whole()
            if group._running not in (None, network):
                raise LiteBusyError(call=call)
            group._running = network

    def end(self, network: int) -> None:
        """Mark ``network`` as idle, after its run or after its end."""
        with _lock:
            group = self._whole()
            if group._running == network:
                group._running = None

    @contextlib.contextmanager
    def joining(self, call: str, other: "MemoryGroup") -> Iterator[None]:
        """Merge this group with ``other`` at the end of the ``with`` block, unless the block raises.

        No network can start a run during the block. Raises LiteBusyError if a network of either group runs."""
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
