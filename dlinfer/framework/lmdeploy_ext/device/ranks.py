"""Patches how the processes of tensor parallelism form a group, and assigns each process a part of the host."""

from typing import Any

import torch.distributed as dist

from dlinfer.framework.lmdeploy_ext.device import activation, devices
from dlinfer.framework.patching import Original, replaces
from dlinfer.vendor import discovery
from dlinfer.vendor.device import host_identity

FEATURE = "tensor parallelism"


def are_served(device_type: str) -> bool:
    """Return whether the vendor of ``device_type`` supports tensor parallelism over several devices."""
    return discovery.device(devices.torch_device(device_type)).tensor_parallel


def graphs_are_served(device_type: str) -> bool:
    """Return whether tensor parallelism may use graph mode on this device type. Otherwise only eager mode is served."""
    return discovery.device(devices.torch_device(device_type)).graphs_over_ranks


@replaces(
    "lmdeploy.pytorch.engine.executor.dist_utils:init_process_group",
    why="creates the process group with the communicator of 'cuda', because the process has no other device yet",
    when=activation.is_on,
    for_feature=FEATURE,
)
def _init_process_group(original: Original, rank: int, world_size: int) -> None:
    from lmdeploy.pytorch.devices import DeviceContext, get_device_manager

    device_type = activation.active()
    assert device_type is not None, "the patch is in force on devices of ours"
    with get_device_manager().context(DeviceContext(device_type=device_type)):
        original(rank, world_size)
    if activation.device().memory().shared:
        _share_host(rank, world_size)


def _share_host(rank: int, world_size: int) -> None:
    """Confine this rank to its part of the host's CPUs and memory, which the ranks on the host divide."""
    hosts: list[Any] = [None] * world_size
    dist.all_gather_object(hosts, host_identity())
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    activation.device().share(here.index(rank), len(here))
