"""Processes of tensor parallelism: how they join, and how they take LMDeploy's messages while they compute."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation, devices
from dlinfer.framework.patching import Patch
from dlinfer.vendor import discovery


def are_served(device_type: str) -> bool:
    """Whether a model may lie on several of a device, as its vendor says."""
    return discovery.device(devices.torch_device(device_type)).tensor_parallel


def _init_process_group(original: Callable[[int, int], None]) -> Callable[[int, int], None]:
    @functools.wraps(original)
    def init_process_group(rank: int, world_size: int) -> None:
        from lmdeploy.pytorch.devices import DeviceContext, get_device_manager

        active = activation.active()
        if active is None:
            return original(rank, world_size)
        with get_device_manager().context(DeviceContext(device_type=active)):
            return original(rank, world_size)

    return init_process_group


def _wait_async(
    original: Callable[[Any], AbstractAsyncContextManager[None]],
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    from lmdeploy.pytorch.engine.executor.mp_executor import NUM_SHARED_BLOCK

    @functools.wraps(original)
    @asynccontextmanager
    async def wait_async(self: Any) -> AsyncIterator[None]:
        if activation.active() is None:
            async with original(self):
                yield
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.events[self._event_id].wait)
        yield
        if self._event_id == NUM_SHARED_BLOCK - 1:
            for _ in range(2):  # until all have read the last block, and until all blocks are free
                await loop.run_in_executor(None, self.bar.wait)
        self._update_event_id()

    return wait_async


PATCHES = (
    Patch(
        target="lmdeploy.pytorch.engine.executor.dist_utils:init_process_group",
        why="asks the backend of 'cuda' for the communicator, as the device is not yet the process's",
        signature="(rank, world_size)",
        build=_init_process_group,
    ),
    Patch(
        target="lmdeploy.pytorch.engine.executor.mp_executor:Notifier.wait_async",
        why="waits for the other ranks in the event loop, every 32nd message; a rank whose step has begun meanwhile, "
        "and waits for this one's part of a sum, then waits for ever",
        signature="(self)",
        build=_wait_async,
    ),
)
