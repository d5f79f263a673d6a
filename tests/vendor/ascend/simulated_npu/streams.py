"""Streams and events of the simulated NPU: work is done at once, and what has to come before what is written down.

A number of a replay says how far: all that is put on a stream from now on comes after the replays up to its ``after``.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.vendor import simulated_graph

_now = threading.local()
launched = [0]
"""How many replays there were."""
_waited = [0]  # up to which replay the host has waited, so that whatever it does next comes after that


def host_waited() -> int:
    """The last replay that the host has waited for."""
    return _waited[0]


def wait_for_all() -> None:
    """The host waits for whatever was put on any stream."""
    _waited[0] = launched[0]


class Stream:
    """As ``torch.npu.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority, self.after = priority, 0

    def synchronize(self) -> None:
        """Raises CaptureFault while a graph is captured."""
        simulated_graph.refuse("synchronize")
        _waited[0] = max(_waited[0], self.after)

    def wait_stream(self, stream: "Stream") -> None:
        self.after = max(self.after, stream.after)

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event if event is not None else Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True


DEFAULT = Stream()


def current() -> Stream:
    """The stream that this thread puts work on."""
    return getattr(_now, "stream", DEFAULT)


@contextmanager
def using(stream: Stream | None) -> Iterator[None]:
    """As ``torch.npu.stream``."""
    before = current()
    _now.stream = stream if stream is not None else before
    try:
        yield
    finally:
        _now.stream = before


class Event:
    """As ``torch.npu.Event``. Waiting for one that was never recorded is waiting for nothing."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.after = 0

    def record(self, stream: Stream | None = None) -> None:
        self.after = (stream or current()).after

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or current()
        stream.after = max(stream.after, self.after)

    def synchronize(self) -> None:
        """Raises CaptureFault while a graph is captured."""
        simulated_graph.refuse("synchronize")
        _waited[0] = max(_waited[0], self.after)

    def query(self) -> bool:
        """Whether it has happened: always."""
        return True
