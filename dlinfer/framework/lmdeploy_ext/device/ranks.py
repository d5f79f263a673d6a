"""Patches how tensor-parallel processes join a process group, and how they wait for LMDeploy's messages."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dlinfer.framework.lmdeploy_ext.device import activation, devices
from dlinfer.framework.patching import Original, replaces
from dlinfer.vendor import discovery

FEATURE = "tensor parallelism"


def are_served(device_type: str) -> bool:
    """Return whether the vendor of ``device_type`` supports tensor parallelism on several devices."""
    return discovery.device(devices.torch_device(device_type)).tensor_parallel


@replaces(
    "lmdeploy.pytorch.engine.executor.dist_utils:init_process_group",
    why="asks the backend of 'cuda' for the communicator, as the device is not yet the process's",
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
    """Let this rank use only a part of the host, because other ranks run on the same host."""
    hosts: list[Any] = [None] * world_size
    dist.all_gather_object(hosts, host_identity())
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    activation.device().share(here.index(rank), len(here))


def host_identity() -> str:
    """Return a text that is the same for two processes exactly if they run on the same host."""
    with suppress(OSError):  # not Linux
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {socket.gethostname()}"
    return socket.gethostname()


@replaces(
    "lmdeploy.pytorch.engine.executor.mp_executor:Notifier.wait_async",
    why="waits for the other ranks in the event loop, every 32nd message; a rank whose step has begun meanwhile, "
    "and waits for this one's part of a sum, then waits for ever",
    when=activation.is_on,
    for_feature=FEATURE,
)
@asynccontextmanager
async def _wait_async(original: Original, self: Any) -> AsyncIterator[None]:
    from lmdeploy.pytorch.engine.executor.mp_executor import NUM_SHARED_BLOCK

    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, self.events[self._event_id].wait)
    yield
    if self._event_id == NUM_SHARED_BLOCK - 1:
        for _ in range(2):  # first until all ranks have read the last block, then until all blocks are free
            await loop.run_in_executor(None, self.bar.wait)
    self._update_event_id()
