"""Messages between dlinfer's process and a worker: a length, then JSON. Shared memory carries the data of tensors."""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


class ClosedError(Exception):
    """The process at the other end of the socket has closed it or has ended."""


def packed(message: dict[str, Any]) -> bytes:
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message. Raises OSError if the process at the other end has ended."""
    connection.sendall(packed(message))


def receive(connection: socket.socket) -> dict[str, Any]:
    """Wait for a message and return it. Raises ClosedError, or TimeoutError if the socket has a timeout."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return json.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        piece = connection.recv(count - len(parts))
        if not piece:
            raise ClosedError
        parts += piece
    return bytes(parts)
