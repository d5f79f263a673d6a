"""What frameworks are told of the fake device. It counts what it is asked."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dlinfer.conformance.stand_in import memory
from dlinfer.vendor import Device, DeviceMemory
from dlinfer.vendor.streams import HostEvent, HostStream

asked: Counter[str] = Counter()


class FakeStreams:
    """Streams that know which of them is the current one."""

    Stream = HostStream
    Event = HostEvent

    def __init__(self) -> None:
        self._current = HostStream()

    def current_stream(self) -> HostStream:
        asked["current_stream"] += 1
        return self._current

    @contextmanager
    def stream(self, stream: HostStream) -> Iterator[None]:
        asked["stream"] += 1
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self) -> None:
        asked["synchronize"] += 1

    def empty_cache(self) -> None:
        asked["empty_cache"] += 1


class FakeDevice(Device):
    """A card with memory of its own."""

    communicator = "fakeccl"
    max_batch_size = 8

    def __init__(self) -> None:
        self.streams = FakeStreams()

    def memory(self) -> DeviceMemory:
        asked["memory"] += 1
        return DeviceMemory(memory.free(), memory.TOTAL, "the fake device's own", shared=False)
