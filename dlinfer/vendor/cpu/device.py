"""The CPU as a device for serving frameworks. It shares memory with other programs, and runs work synchronously."""

import os

import torch
from torch import Tensor

from dlinfer import settings
from dlinfer.vendor.cpu.host import shares
from dlinfer.vendor.cpu.host.cpus import usable_cpus
from dlinfer.vendor.cpu.host.memory import usable_memory
from dlinfer.vendor.cpu.host.threads import fit_threads
from dlinfer.vendor.device import Device, DeviceMemory, Sampler
from dlinfer.vendor.streams import HostStreams


class CpuDevice(Device):
    communicator = "gloo"
    tensor_parallel = True
    graphs_over_ranks = True
    # Memory bandwidth bounds decode on a CPU: past some tens of sequences a larger batch only adds latency.
    max_batch_size = 64
    # Products of 512 rows run at the CPU's peak already, and more rows take longer for nothing.
    max_prefill_tokens = 1024

    def __init__(self) -> None:
        self.streams = HostStreams()
        self._share: shares.MemoryShare | None = None
        self._spins = False
        self.seconds_beside_decoding = settings.current().cpu_step_seconds
        self.seconds_of_prompts = settings.current().cpu_prompt_seconds
        fit_threads()
        _keep_few_primitives()

    def memory(self) -> DeviceMemory:
        """Return the memory that the host and this process's cgroup still allow.

        After ``share``, return this rank's part of it.
        """
        usable = usable_memory() if self._share is None else self._share.usable()
        return DeviceMemory(usable.available, usable.limit, usable.source, shared=True)

    def share(self, index: int, count: int) -> None:
        """Limit this process to its part of the host's CPUs and memory. index: its rank among ``count`` processes."""
        self._spins = shares.has_room_for(count)
        shares.take(shares.share_of(index, count))
        self._share = shares.MemoryShare(count)

    def description(self) -> str:
        return f"{usable_cpus()}; torch uses {torch.get_num_threads()}"

    def connect(self, group: int) -> str:
        """Let the ranks of a group sum through shared memory, if all run on this host and have the C++ kernels.

        group: a group number of ``dlinfer.ops.collective.groups``. Returns a text that says how the ranks sum.
        """
        from dlinfer.vendor.cpu import ranks

        return "shared memory" if ranks.share_memory(group, spins=self._spins) else super().connect(group)

    def disconnect(self, group: int) -> None:
        """Free the group's shared memory."""
        from dlinfer.vendor.cpu import ranks

        ranks.free_memory(group)

    def sampler(self) -> Sampler:
        from dlinfer.vendor.cpu.sampling import CpuSampler

        return CpuSampler()

    def pack_bf12(self, weight: Tensor) -> Tensor:
        from dlinfer.vendor.cpu.bf12.matrices import pack

        return pack(weight)

    def is_faster_with_bf12(self, most_rows: int) -> bool:
        from dlinfer.vendor.cpu.bf12 import speed

        return speed.is_faster(most_rows, torch.get_num_threads())


# oneDNN and torch's layer above it cache what they prepare for a product of each size: 0.75 MB for each number of rows
# in 16 bits, up to a thousand of them. Prompts have all lengths, and experts all numbers of rows, so a server would
# come to hold several hundred megabytes. Preparing it again takes no measurable time.
_KEPT = "32"
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def _keep_few_primitives() -> None:
    """Bound the caches of oneDNN and torch, unless the user has set the environment variables of their sizes.

    Both libraries read these variables at the first product.
    """
    for name in _CACHES:
        os.environ.setdefault(name, _KEPT)
