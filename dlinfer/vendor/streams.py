"""Streams and events of a device, and a stand-in for a device that works synchronously.

``Streams`` is the part of ``torch.cuda`` that serving frameworks use. Modules like ``torch.npu`` have the same names,
so a vendor can pass its module unchanged. On the host, work runs at once in the caller's thread, so every stream is
idle and every event has happened. Streams are still distinct objects, since frameworks compare them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Streams(Protocol):
    """The part of ``torch.cuda`` for streams, events and memory.

    Stream, Event: types with torch.cuda's methods. current_stream: the stream that receives work. stream: a context
    that makes another stream current. synchronize: waits for all work. empty_cache: frees memory that no tensor holds.
    """

    @property
    def Stream(self) -> Any: ...  # noqa: N802 - torch's names

    @property
    def Event(self) -> Any: ...  # noqa: N802

    def current_stream(self) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...


class HostStream:
    """A stream of the host. Work runs at once in the caller's thread, so the stream is always idle."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def wait_stream(self, stream: "HostStream") -> None:
        """Return at once: the other stream has no pending work."""

    def wait_event(self, event: "HostEvent") -> None:
        """Return at once: the event has happened."""

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        """Return ``event``, or a new event. Like all events here it has happened."""
        return event if event is not None else HostEvent()

    def query(self) -> bool:
        return True


class HostEvent:
    """An event of the host. It counts as happened from the start."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: HostStream | None = None) -> None:
        """Do nothing: all earlier work is done already."""

    def wait(self, stream: HostStream | None = None) -> None:
        """Return at once: the event has happened."""

    def synchronize(self) -> None:
        """Return at once: the event has happened."""

    def query(self) -> bool:
        return True


class HostStreams:
    """The ``Streams`` of a device that works synchronously: a call returns when its work is done."""

    Stream = HostStream
    Event = HostEvent

    def __init__(self) -> None:
        self._current = HostStream()

    def current_stream(self) -> HostStream:
        """Return the only stream."""
        return self._current

    def stream(self, stream: HostStream) -> AbstractContextManager[None]:
        """Return a context that does nothing: work is done at once, whatever the stream."""
        return nullcontext()

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def empty_cache(self) -> None:
        """Do nothing: the host's allocator keeps no cache of its own."""
