"""The session's own tensors for inputs and outputs, and the memory that they lie in.

The tensors lie in an arena: one large tensor on each device. Two sessions may share an arena; while one of them runs,
the other waits. Inside a session nothing is shared: every stage of every entry has its own place in the arena.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from dlinfer.errors import SessionCallError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port

_ALIGNMENT = 64

Side = Literal["inputs", "outputs"]
SIDES: tuple[Side, Side] = ("inputs", "outputs")


def ports_of(interface: Interface, side: Side) -> Sequence[Port]:
    return interface.inputs if side == "inputs" else interface.outputs


def nbytes(port: Port) -> int | None:
    """Return the size in bytes of an input or output at its highest sizes.

    Return None if a size has no highest value.
    """
    return None if -1 in port.max_shape else math.prod(port.max_shape) * port.dtype.itemsize


class RuntimeMemory:
    """One arena on each device, and a lock. A run holds the lock while it uses the arenas."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._arenas: dict[torch.device, torch.Tensor] = {}

    def reserve(self, device: torch.device, size: int) -> torch.Tensor:
        """Return the device's arena, which has at least ``size`` bytes. Every caller gets the same memory.

        The exception is an arena that is too small: a larger one replaces it. Earlier callers then keep the old arena,
        and later callers get the new one.
        """
        with self.lock:
            known = self._arenas.get(device)
            if known is None or known.numel() < size:
                self._arenas[device] = torch.zeros(size, dtype=torch.uint8, device=device)
            return self._arenas[device]

    def release(self) -> None:
        """Drop the arenas. An arena's memory is freed when no tensor uses it any more."""
        with self.lock:
            self._arenas.clear()

    @property
    def nbytes(self) -> int:
        with self.lock:
            return sum(arena.numel() for arena in self._arenas.values())


COMMON = RuntimeMemory()
"""The memory of all sessions that were loaded with ``Flags.SHARE_MEM``."""


class IoMemory:
    """A session's own tensors for inputs and outputs, at their highest sizes. They lie in a RuntimeMemory.

    No two of these tensors overlap. So a caller may fill the inputs of one entry while it reads the results of another.
    """

    def __init__(self, signatures: Mapping[str, Sequence[Interface]], memory: RuntimeMemory) -> None:
        ports = {
            (entry, number, side, port.name): port
            for entry, interfaces in signatures.items()
            for number, interface in enumerate(interfaces)
            for side in SIDES
            for port in ports_of(interface, side)
            if not port.number and nbytes(port) is not None
        }
        starts: dict[tuple[str, int, str, str], int] = {}
        ends: dict[torch.device, int] = {}
        for place, port in ports.items():
            starts[place] = ends.get(port.device, 0)
            ends[port.device] = starts[place] + -(-(nbytes(port) or 0) // _ALIGNMENT) * _ALIGNMENT
        arenas = {device: memory.reserve(device, size) for device, size in ends.items()}
        self._bytes = {place: arenas[port.device][starts[place] :] for place, port in ports.items()}

    def bytes_of(self, entry: str, stage: int, side: Side, port: Port) -> torch.Tensor:
        """Return the part of the arena that begins where a port's tensor begins, as bytes.

        It ends where the arena ends.

        Raises SessionCallError if a size has no highest value.
        """
        memory = self._bytes.get((entry, stage, side, port.name))
        if memory is None:
            detail = "one of its sizes has no highest value; compile with a Dim that has a max"
            raise SessionCallError(what="the session's own memory for", name=port.name, detail=detail)
        return memory

    def tensor(
        self, entry: str, stage: int, side: Side, port: Port, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the port's tensor at its highest sizes, or a contiguous tensor of ``shape`` in the same memory.

        Raises SessionCallError if ``shape`` exceeds the highest sizes, or if a size has no highest value.
        """
        memory = self.bytes_of(entry, stage, side, port)
        sizes = port.max_shape if shape is None else tuple(shape)
        fits = len(sizes) == len(port.max_shape) and all(map(int.__le__, sizes, port.max_shape))
        if not fits or min(sizes, default=0) < 0:
            detail = f"sizes {sizes} do not fit into the highest sizes {port.max_shape}"
            raise SessionCallError(what="tensor for", name=port.name, detail=detail)
        return memory[: math.prod(sizes) * port.dtype.itemsize].view(port.dtype).view(sizes)
