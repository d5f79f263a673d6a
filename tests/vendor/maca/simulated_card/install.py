"""Make the device "maca" of this process: dlinfer's stand-in under that name, which the vendor takes for its own.

``install`` stands where a vendor's entry point of ``torch.backends`` would. torch gives PrivateUse1 to one device a
process, and for good. It runs inside ``import torch``, which may be dlinfer's own: nothing of dlinfer.vendor is
imported before somebody asks.
"""

from functools import cached_property
from typing import Any

from dlinfer.conformance import stand_in

NAME = "maca"


def install() -> None:
    """Make the device, once. For the entry point group ``torch.backends``, or at any time."""
    stand_in.install(NAME, _Card())


class _Card(stand_in.Module):
    """``torch.maca``, as the adaptor asks ``torch.cuda``."""

    @cached_property
    def _streams(self) -> Any:
        from dlinfer.vendor.streams import HostStreams

        return HostStreams()

    def __getattr__(self, name: str) -> Any:
        """Of ``Streams``: they are the host's, where a call returns when its work is done."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._streams, name)

    @property
    def CUDAGraph(self) -> Any:  # noqa: N802 - torch's name
        from tests.vendor import simulated_graph

        return simulated_graph.Graph

    def is_current_stream_capturing(self) -> bool:
        from tests.vendor import simulated_graph

        return simulated_graph.capturing()

    def synchronize(self, device: Any = None) -> None:
        """All is done. Raises CaptureFault while a graph is captured."""
        from tests.vendor import simulated_graph

        simulated_graph.refuse("synchronize")

    def set_device(self, device: Any) -> None:
        """There is one."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return stand_in.free(), stand_in.TOTAL

    def get_device_name(self, device: Any = None) -> str:
        return "simulated"
