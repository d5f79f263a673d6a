"""The host as a device of serving frameworks: memory that is shared with all that runs there, and no queues."""

from dlinfer.vendor.cpu.memory import usable_memory
from dlinfer.vendor.device import Device, DeviceMemory
from dlinfer.vendor.streams import HostStreams


class CpuDevice(Device):
    """The CPU."""

    communicator = "gloo"
    # Decode on a CPU is bound by memory bandwidth; past some tens of sequences a larger batch only adds latency.
    max_batch_size = 64

    def __init__(self) -> None:
        self.streams = HostStreams()

    def memory(self) -> DeviceMemory:
        """What the host and this process's cgroup still allow."""
        usable = usable_memory()
        return DeviceMemory(usable.available, usable.limit, usable.source, shared=True)
