"""The host as a device of serving frameworks: memory that is shared with all that runs there, and no queues."""

import os

from torch import Tensor

from dlinfer.vendor.cpu.host.memory import usable_memory
from dlinfer.vendor.cpu.host.threads import fit_threads
from dlinfer.vendor.device import Device, DeviceMemory, Sampler
from dlinfer.vendor.streams import HostStreams


class CpuDevice(Device):
    """The CPU."""

    communicator = "gloo"
    # Decode on a CPU is bound by memory bandwidth; past some tens of sequences a larger batch only adds latency.
    max_batch_size = 64
    # Products of 512 rows run at the CPU's peak already, and who decodes waits seconds for each thousand tokens.
    max_prefill_tokens = 1024
    # A stream's tokens come half a second apart meanwhile (0.5B, two cores), and products of 256 rows lose a tenth.
    prefill_tokens_beside_decoding = 256

    def __init__(self) -> None:
        self.streams = HostStreams()
        fit_threads()
        _keep_few_primitives()

    def memory(self) -> DeviceMemory:
        """Memory that the host and this process's cgroup still allow."""
        usable = usable_memory()
        return DeviceMemory(usable.available, usable.limit, usable.source, shared=True)

    def sampler(self) -> Sampler:
        """The C++ kernels'."""
        from dlinfer.vendor.cpu.sampling import CpuSampler

        return CpuSampler()

    def pack_bf12(self, weight: Tensor) -> Tensor:
        """By the C++ kernel, where there is one."""
        from dlinfer.vendor.cpu.bf12.matrices import pack

        return pack(weight)


# oneDNN and torch's layer upon it keep what they have made for a product of each size: 0.75 MB for each number of rows
# in 16 bits, a thousand of them. Prompts have all lengths, and experts all numbers of rows, so a server would come to
# hold several hundred megabytes; making one anew takes no time that can be measured.
_KEPT = "32"
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def _keep_few_primitives() -> None:
    """The libraries read these variables at the first product of the process. A user's own settings stay."""
    for name in _CACHES:
        os.environ.setdefault(name, _KEPT)
