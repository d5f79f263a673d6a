"""The weights of an artifact: one member in which each tensor lies as it did in memory, used where it lies."""

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlinfer.errors import ArtifactCorruptError, ArtifactStorageError
from dlinfer.runtime.artifact.container import ALIGNMENT, Container
from dlinfer.runtime.artifact.graph_json import Layout

PLAIN_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 "
        "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    ).split()
)
"""Dtypes that a tensor in a file may have: an element is a number of whole bytes."""

_CHUNK = 1 << 24


@dataclass
class TensorTable:
    """The tensors that are to be written, each memory once."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)
    _end: int = 0

    def add(self, tensor: torch.Tensor) -> int:
        """The number of a tensor; one that lies where another does, in the same way, has the same number."""
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise ArtifactStorageError(
                what="a weight", detail=f"it has layout {tensor.layout} on {tensor.device}"
            )
        layout = Layout.of(tensor)
        key = (tensor.data_ptr() or len(self.tensors), layout)
        if key in self._known:
            return self._known[key]
        number = self._known[key] = len(self.tensors)
        self.tensors.append(tensor)
        self.offsets.append(self._end)
        self._end += -(-_span(layout) // ALIGNMENT) * ALIGNMENT
        return number

    def listed(self) -> list[dict[str, Any]]:
        """For the manifest: what each tensor is and where it begins."""
        return [
            {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "sizes": list(tensor.shape),
                "strides": list(tensor.stride()),
                "device": str(tensor.device),
                "offset": offset,
            }
            for tensor, offset in zip(self.tensors, self.offsets, strict=True)
        ]

    def chunks(self) -> Iterator[memoryview]:
        """The contents of the member, a few mebibytes at a time."""
        for tensor in self.tensors:
            size = _span(Layout.of(tensor))
            if size:
                yield from _pieces(tensor, size)
                yield memoryview(bytes(-size % ALIGNMENT))


def _span(layout: Layout) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if 0 in layout.sizes:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(layout.sizes, layout.strides, strict=True))
    return (steps + 1) * layout.dtype.itemsize


def _pieces(tensor: torch.Tensor, size: int) -> Iterator[memoryview]:
    """The memory that a tensor spans."""
    elements = size // tensor.dtype.itemsize
    flat = tensor.detach().as_strided((elements,), (1,)).view(torch.uint8)
    for start in range(0, size, _CHUNK):
        yield flat[start : start + _CHUNK].cpu().numpy().data


class TensorFile:
    """The tensors of an artifact that was read. Each is made when first asked for and lies in the file's memory."""

    def __init__(self, listed: Sequence[tuple[Layout, int]], container: Container, member: str) -> None:
        """Raises ArtifactCorruptError where a tensor lies beyond the member."""
        self.layouts = [layout for layout, _ in listed]
        self._offsets = [offset for _, offset in listed]
        self._memory = container.member(member)
        self._owner = container.memory
        self._made: dict[int, torch.Tensor] = {}
        self.digest = container.digests[member]
        for number, (layout, offset) in enumerate(listed):
            if offset % ALIGNMENT or offset + _span(layout) > len(self._memory):
                detail = f"tensor {number} lies beyond the end of {member}"
                raise ArtifactCorruptError(source=container.source, detail=detail)

    def tensor(self, number: int) -> torch.Tensor:
        """A tensor. It is not to be written; ``own`` gives one that may be."""
        if number not in self._made:
            layout = self.layouts[number]
            start, size = self._offsets[number], _span(layout)
            self._made[number] = _tensor(self._memory[start : start + size], layout, self._owner)
        return self._made[number]

    def own(self, number: int) -> torch.Tensor:
        """A copy of a tensor in memory of its own."""
        layout = self.layouts[number]
        copy = torch.empty_strided(layout.sizes, layout.strides, dtype=layout.dtype, device=layout.device)
        return copy.copy_(self.tensor(number))


def _tensor(memory: memoryview, layout: Layout, owner: Any) -> torch.Tensor:
    """A tensor on memory that is not copied, unless its device has other memory."""
    if not len(memory):
        return torch.empty_strided(layout.sizes, layout.strides, dtype=layout.dtype, device=layout.device)
    if memory.readonly:  # torch warns of these at each; nothing writes into a weight, see ``own``
        memory = _writable(memory, owner)
    flat = torch.frombuffer(memory, dtype=layout.dtype)
    return flat.as_strided(layout.sizes, layout.strides).to(layout.device)


def _writable(memory: memoryview, owner: Any) -> Any:
    import numpy

    address = numpy.frombuffer(memory, numpy.uint8).ctypes.data
    array: Any = (ctypes.c_char * len(memory)).from_address(address)
    array.owner = owner  # the bytes must live as long as the tensor
    return array


def nbytes(layout: Layout) -> int:
    """Bytes of a tensor's elements."""
    return math.prod(layout.sizes) * layout.dtype.itemsize
