"""A client that leaves ends its stream in the engine's process without an error in the log.

LMDeploy 0.18 cancels the stream's task, and ``asyncio.wait_for`` may swallow that before Python 3.12 (bpo-37658). The
task then publishes to a mailbox that is closed, which is logged as a failure, with a traceback for each client.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.patching import Patch


def _publish(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def publish(self: Any, output: Any) -> None:
        if activation.active() is not None and self.done:
            raise asyncio.CancelledError("the client has left")
        original(self, output)

    return publish


PATCHES = (
    Patch(
        target="lmdeploy.pytorch.engine.mp_engine.base_worker:StreamMailbox.publish",
        why="takes a client that has left for a failure of the engine",
        signature="(self, output)",
        build=_publish,
        versions=FAULTY,
        essential=False,
    ),
)
