"""Make the device "maca" of this process: dlinfer's stand-in under that name, which the vendor then takes for its own.

``install`` stands where a vendor's entry point of ``torch.backends`` would. torch gives PrivateUse1 to one device a
process, and for good.
"""

from dataclasses import replace
from typing import Any

from dlinfer.conformance import stand_in

NAME = "maca"
_installed: list[bool] = []


def install() -> None:
    """Make the device. For the entry point group ``torch.backends``, or at any time."""
    if _installed:
        return
    _installed.append(True)
    stand_in.install(NAME, _Card())
    from dlinfer.vendor import maca

    maca.VENDOR = replace(maca.VENDOR, device_type=NAME)


class _Card(stand_in.Module):
    """``torch.maca``, as the adaptor asks ``torch.cuda``."""

    def __init__(self) -> None:
        from dlinfer.vendor.streams import HostEvent, HostStream, HostStreams

        streams = HostStreams()
        self.Stream, self.Event = HostStream, HostEvent
        self.current_stream = lambda device=None: streams.current_stream()
        self.stream, self.empty_cache = streams.stream, streams.empty_cache

    def synchronize(self, device: Any = None) -> None:
        """All is done."""

    def set_device(self, device: Any) -> None:
        """There is one."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return stand_in.free(), stand_in.TOTAL

    def get_device_name(self, device: Any = None) -> str:
        return "simulated"
