"""A client that leaves ends its stream in the engine's process without an error in the log.

LMDeploy 0.18 cancels the stream's task, and ``asyncio.wait_for`` may swallow that before Python 3.12 (bpo-37658). The
task then publishes to a mailbox that is closed, which is logged as a failure, with a traceback for each client.
"""

import asyncio
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


@corrects(
    "lmdeploy.pytorch.engine.mp_engine.base_worker:StreamMailbox.publish",
    why="takes a client that has left for a failure of the engine",
    essential=False,
)
def _publish(original: Original, self: Any, output: Any) -> None:
    if self.done:
        raise asyncio.CancelledError("the client has left")
    original(self, output)
