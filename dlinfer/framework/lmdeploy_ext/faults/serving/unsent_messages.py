"""Close the sockets of a client whose engine has ended, without waiting for messages that can no longer be sent."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


@corrects(
    "lmdeploy.pytorch.engine.mp_engine.zmq_rpc:AsyncRPCClient.close_sockets",
    why="waits forever in context.term() for a message that a dead engine can no longer take",
    essential=False,
)
def _close_sockets(original: Original, self: Any) -> None:
    for socket in (self.async_socket, self.sync_socket):
        if not socket.closed:
            socket.linger = 0
    original(self)
