"""``torch.cuda`` as LMDeploy's engine uses it, for a device whose work is done when the call returns.

On such a device every stream is always idle and every event has always happened; only identity matters, since
the engine asserts that its cache stream is not the current one.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


class HostStream:
    """A stream without a queue."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        """Nothing is pending."""

    def wait_stream(self, stream: "HostStream") -> None:
        """The other stream's work is done."""

    def wait_event(self, event: "HostEvent") -> None:
        """The event has happened."""

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        """An event that has happened."""
        return event if event is not None else HostEvent()

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True


class HostEvent:
    """An event that has happened."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: HostStream | None = None) -> None:
        """What precedes it is done already."""

    def wait(self, stream: HostStream | None = None) -> None:
        """It has happened."""

    def synchronize(self) -> None:
        """It has happened."""

    def query(self) -> bool:
        """Whether it has happened: always."""
        return True


@dataclass(frozen=True)
class HostProperties:
    """The fields of a device's properties that the engine reads."""

    name: str
    uuid: str
    total_memory: int


class HostAccelerator:
    """Stands where LMDeploy's modules say ``torch.cuda``."""

    Stream = HostStream
    Event = HostEvent

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._current = HostStream()

    def current_stream(self, device: Any = None) -> HostStream:
        """The one stream that work is done on."""
        return self._current

    def stream(self, stream: HostStream) -> AbstractContextManager[None]:
        """Work is done at once, whatever the stream."""
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        """Nothing is pending."""

    def empty_cache(self) -> None:
        """The host's allocator keeps no cache of its own."""

    def current_device(self) -> torch.device:
        """The device, as something that ``device=`` takes."""
        return self._device

    def set_device(self, device: Any) -> None:
        """There is one device."""

    def is_available(self) -> bool:
        """No CUDA is meant to be used here."""
        return False

    def get_device_properties(self, device: Any = None) -> HostProperties:
        """Name, id and memory of the device."""
        from dlinfer.vendor.cpu.memory import usable_memory

        name = str(self._device)
        return HostProperties(name=name, uuid=name, total_memory=usable_memory().limit)
