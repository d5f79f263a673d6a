"""Log no error if a client disconnects during its stream.

LMDeploy 0.18 then cancels the stream's task in the engine's process. Before Python 3.12 ``asyncio.wait_for`` may
swallow the cancellation (bpo-37658). The task then publishes to a closed mailbox, which logs a traceback for each
disconnected client.
"""

import asyncio
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


@corrects(
    "lmdeploy.pytorch.engine.mp_engine.base_worker:StreamMailbox.publish",
    why="treats a client that has left as a failure of the engine",
    essential=False,
)
def _publish(original: Original, self: Any, output: Any) -> None:
    if self.done:
        raise asyncio.CancelledError("the client has left")
    original(self, output)
