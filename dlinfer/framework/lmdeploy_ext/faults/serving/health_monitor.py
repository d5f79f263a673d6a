"""End a server's health monitor even if Python swallows the first cancellation of the monitor's task."""

import asyncio
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


@corrects(
    "lmdeploy.serve.core.health:EngineHealthMonitor.stop",
    why="cancels its task once and waits for its end; before Python 3.12 asyncio.wait_for may swallow the "
    "cancellation (bpo-37658), and the wait never ends",
    essential=False,
)
async def _stop_health_monitor(original: Original, self: Any) -> None:
    if self._task is None:
        await original(self)
        return
    while not self._task.done():
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=1)
    self._task = None
