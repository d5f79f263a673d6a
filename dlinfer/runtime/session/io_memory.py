"""The memory that sessions run in besides their weights: tensors of their own for inputs and outputs.

Two sessions that never run at once may share it (U6): their tensors then lie in one arena, and each waits for the
other's run to end.
"""

import math
import threading
from collections.abc import Sequence

import torch

from dlinfer.errors import SessionCallError
from dlinfer.runtime.artifact.signature import Port, Signature

_ALIGNMENT = 64


class RuntimeMemory:
    """An arena for each device, and the lock that keeps runs in it apart."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._arenas: dict[torch.device, torch.Tensor] = {}

    def reserve(self, device: torch.device, size: int) -> torch.Tensor:
        """At least ``size`` bytes of the device, the same for everybody who asks.

        An arena that is too small is replaced: who holds the old one keeps it, and shares no longer.
        """
        with self.lock:
            known = self._arenas.get(device)
            if known is None or known.numel() < size:
                self._arenas[device] = torch.zeros(size, dtype=torch.uint8, device=device)
            return self._arenas[device]

    def release(self) -> None:
        """Give the arenas back, as far as no tensor lies in them."""
        with self.lock:
            self._arenas.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        with self.lock:
            return sum(arena.numel() for arena in self._arenas.values())


COMMON = RuntimeMemory()
"""What sessions share that were loaded with ``Flags.SHARE_MEM``."""


class IoTensors:
    """The tensors for inputs and outputs of one stage, at their highest sizes, in a RuntimeMemory."""

    def __init__(self, signature: Signature, memory: RuntimeMemory) -> None:
        """Raises SessionCallError where a size has no highest value."""
        self.signature = signature
        ports = [port for port in (*signature.inputs, *signature.outputs) if not port.number]
        offsets: dict[int, int] = {}
        ends: dict[torch.device, int] = {}
        for port in ports:
            if -1 in port.max_shape:
                detail = "a size of it has no highest value; compile with a Dim that has a max"
                raise SessionCallError(what="memory of its own for", name=port.name, detail=detail)
            offsets[id(port)] = start = ends.get(port.device, 0)
            size = math.prod(port.max_shape) * port.dtype.itemsize
            ends[port.device] = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        arenas = {device: memory.reserve(device, end) for device, end in ends.items()}
        self._bytes = {
            id(port): arenas[port.device][offsets[id(port)] :][
                : math.prod(port.max_shape) * port.dtype.itemsize
            ]
            for port in ports
        }

    def tensor(self, port: Port, shape: Sequence[int] | None = None) -> torch.Tensor:
        """The port's tensor at its highest sizes, or a contiguous one of other sizes in the same memory."""
        wanted = port.max_shape if shape is None else tuple(shape)
        fits = len(wanted) == len(port.max_shape) and all(map(int.__le__, wanted, port.max_shape))
        if not fits or min(wanted, default=0) < 0:
            detail = f"sizes {wanted} go beyond {port.max_shape}"
            raise SessionCallError(what="tensor for", name=port.name, detail=detail)
        count = math.prod(wanted) * port.dtype.itemsize
        return self._bytes[id(port)][:count].view(port.dtype).view(wanted)
