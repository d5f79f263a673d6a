"""``hccl`` of torch.distributed: torch's gloo on the host's views of the device's tensors, which share their memory."""

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName
from torch.utils import _pytree as pytree

from dlinfer.conformance import stand_in

COLLECTIVES = ("allreduce", "broadcast", "allgather", "_allgather_base", "reduce_scatter", "gather", "reduce")


def register(device: str) -> None:
    """Make the backend known to torch.distributed, once a process."""
    if "hccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("hccl", _Group, devices=[device])


class _Group(dist.ProcessGroup):
    """A group of processes with such a device each."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue] - torch's stub lacks this one
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "hccl"

    def _set_group_name(self, name: GroupName) -> None:
        self._name = name

    @property
    def group_name(self) -> GroupName:
        return self._name  # torch reads it from the C++ backend of a group, and this group has none

    def barrier(self, opts: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._gloo.barrier(opts or dist.BarrierOptions())


def _collective(name: str) -> Any:
    def collective(self: _Group, *args: Any) -> Any:
        host = pytree.tree_map(lambda x: stand_in.on_host(x) if hasattr(x, "untyped_storage") else x, args)
        return getattr(self._gloo, name)(*host)

    return collective


for _name in COLLECTIVES:
    setattr(_Group, _name, _collective(_name))
