"""The memory that sessions run in besides their weights: tensors of their own for inputs and outputs.

Two sessions that never run at once may share it: their tensors then lie in one arena, and each waits for the
other's run to end. Nothing else shares: every stage of every entry of a session has its own place in the arena.
"""

import math
import threading
from collections.abc import Mapping, Sequence

import torch

from dlinfer.errors import SessionCallError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port

_ALIGNMENT = 64


class RuntimeMemory:
    """An arena for each device, and the lock that keeps runs in it apart."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._arenas: dict[torch.device, torch.Tensor] = {}

    def reserve(self, device: torch.device, size: int) -> torch.Tensor:
        """Return at least ``size`` bytes of the device, the same for everybody who asks.

        An arena that is too small is replaced; whoever holds the old one keeps it, and no longer shares it.
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


class IoMemory:
    """A session's own tensors: each stage of each entry has a place of its own.

    Sessions that share a RuntimeMemory lie in the same place, as they were told to; the stages of one session never do:
    its caller may fill the inputs of one entry while another's results are still being read.
    """

    def __init__(self, stages: Mapping[tuple[str, int], Interface], memory: RuntimeMemory) -> None:
        self._stages = stages
        self._memory = memory
        self._made: dict[tuple[str, int], IoTensors] = {}
        self._starts: dict[tuple[str, int], dict[torch.device, int]] = {}
        self._ends: dict[torch.device, int] = {}
        for stage, interface in stages.items():
            self._starts[stage] = dict(self._ends)
            for port in _tensor_ports(interface):
                if -1 not in port.max_shape:
                    self._ends[port.device] = self._ends.get(port.device, 0) + _room(port)

    def stage(self, entry: str, number: int) -> "IoTensors":
        """Return the tensors of a stage. Raises SessionCallError where a size has no highest value."""
        stage = (entry, number)
        with self._memory.lock:
            if stage not in self._made:
                self._made[stage] = IoTensors(
                    self._stages[stage], self._memory, self._starts[stage], self._ends
                )
            return self._made[stage]


class IoTensors:
    """The tensors for inputs and outputs of one stage, at their highest sizes, in a RuntimeMemory."""

    def __init__(
        self,
        interface: Interface,
        memory: RuntimeMemory,
        starts: Mapping[torch.device, int],
        ends: Mapping[torch.device, int],
    ) -> None:
        """starts: where the stage's place begins in each device's arena, in bytes; ends: what the session needs of it.

        Raises SessionCallError where a size has no highest value.
        """
        self.interface = interface
        ports = _tensor_ports(interface)
        for port in ports:
            if -1 in port.max_shape:
                detail = "a size of it has no highest value; compile with a Dim that has a max"
                raise SessionCallError(what="memory of its own for", name=port.name, detail=detail)
        offsets = dict(starts)
        self._bytes: dict[int, torch.Tensor] = {}
        for port in ports:
            start = offsets.get(port.device, 0)
            arena = memory.reserve(port.device, ends[port.device])
            self._bytes[id(port)] = arena[start : start + _nbytes(port)]
            offsets[port.device] = start + _room(port)

    def tensor(self, port: Port, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return the port's tensor at its highest sizes, or a contiguous one of other sizes in the same memory."""
        wanted = port.max_shape if shape is None else tuple(shape)
        fits = len(wanted) == len(port.max_shape) and all(map(int.__le__, wanted, port.max_shape))
        if not fits or min(wanted, default=0) < 0:
            detail = f"sizes {wanted} go beyond {port.max_shape}"
            raise SessionCallError(what="tensor for", name=port.name, detail=detail)
        count = math.prod(wanted) * port.dtype.itemsize
        return self._bytes[id(port)][:count].view(port.dtype).view(wanted)


def _tensor_ports(interface: Interface) -> list[Port]:
    return [port for port in (*interface.inputs, *interface.outputs) if not port.number]


def _nbytes(port: Port) -> int:
    return math.prod(port.max_shape) * port.dtype.itemsize


def _room(port: Port) -> int:
    """The bytes of a port's tensor, rounded up so that the next one is aligned."""
    return -(-_nbytes(port) // _ALIGNMENT) * _ALIGNMENT
