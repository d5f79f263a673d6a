"""``torch.cuda`` as LMDeploy's engine uses it, for the device of a vendor."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from dlinfer.vendor import Device


@dataclass(frozen=True)
class Properties:
    """The fields of a device's properties that the engine reads."""

    name: str
    uuid: str
    total_memory: int


class Accelerator:
    """Stands where LMDeploy's modules say ``torch.cuda``: streams and memory are the vendor's.

    device: torch's name of it. described: what its vendor says of it.
    """

    def __init__(self, device: str, described: Device) -> None:
        self._device = torch.device(device)
        self._described = described
        self.Stream = described.streams.Stream
        self.Event = described.streams.Event

    def current_stream(self, device: Any = None) -> Any:
        """The stream that work is put on."""
        return self._described.streams.current_stream()

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work is put on another stream."""
        return self._described.streams.stream(stream)

    def synchronize(self, device: Any = None) -> None:
        """Wait for all work."""
        self._described.streams.synchronize()

    def empty_cache(self) -> None:
        """Give back memory that no tensor holds."""
        self._described.streams.empty_cache()

    def current_device(self) -> torch.device:
        """The device, as something that ``device=`` takes."""
        return self._device

    def set_device(self, device: Any) -> None:
        """The process of a rank takes the card of its number."""
        if isinstance(device, int):
            self._described.take(device)

    def is_available(self) -> bool:
        """No CUDA is meant to be used here."""
        return False

    def get_device_properties(self, device: Any = None) -> Properties:
        """Name, id and memory of the device."""
        name = str(self._device)
        return Properties(name=name, uuid=name, total_memory=self._described.memory().total)
