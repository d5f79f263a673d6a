"""The weights of an artifact: one member in which each tensor lies as it did in memory, used where it lies."""

import ctypes
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlinfer.errors import ArtifactCorruptError, ArtifactStorageError
from dlinfer.graph.codec.graph import Layout
from dlinfer.graph.ir.conj_neg import is_lazy
from dlinfer.runtime.artifact.container import ALIGNMENT, Container

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
    """The tensors that are to be written, each memory once: those that overlap in memory overlap in the file."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor; one that lies where another does, in the same way, has the same number."""
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise ArtifactStorageError(
                what="a weight", detail=f"it has layout {tensor.layout} on {tensor.device}"
            )
        if is_lazy(tensor):
            detail = "torch holds it lazily conjugated or negated: call resolve_conj() or resolve_neg()"
            raise ArtifactStorageError(what="a weight", detail=detail)
        layout = Layout.of(tensor)
        key = (tensor.data_ptr() or len(self.tensors), layout)
        if key in self._known:
            return self._known[key]
        number = self._known[key] = len(self.tensors)
        self.tensors.append(tensor)
        return number

    def listed(self) -> list[dict[str, Any]]:
        """For the manifest: what each tensor is and where it begins."""
        offsets = dict(offset for block in self._blocks() for offset in block)
        return [
            {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "sizes": list(tensor.shape),
                "strides": list(tensor.stride()),
                "device": str(tensor.device),
                "offset": offsets[number],
            }
            for number, tensor in enumerate(self.tensors)
        ]

    def chunks(self) -> Iterator[memoryview]:
        """Return the contents of the member, a few mebibytes at a time."""
        end = 0
        for block in self._blocks():
            for number, offset in block:
                tensor = self.tensors[number]
                size = _span(Layout.of(tensor))
                if offset + size > end:
                    yield memoryview(bytes(max(0, offset - end)))
                    yield from _pieces(tensor, max(0, end - offset), size)
                    end = offset + size

    def _blocks(self) -> list[list[tuple[int, int]]]:
        """For each memory, (number, offset) of the tensors in it, in the order of their addresses."""
        spans = [(tensor.data_ptr(), _span(Layout.of(tensor)), str(tensor.device)) for tensor in self.tensors]
        blocks: list[list[tuple[int, int]]] = []
        end = 0
        for numbers in overlapping(spans):
            first = spans[numbers[0]][0]
            # A block of several begins in its line of memory where it did: each tensor stays aligned for its dtype.
            start = -(-end // ALIGNMENT) * ALIGNMENT + (first % ALIGNMENT if len(numbers) > 1 else 0)
            blocks.append([(number, start + spans[number][0] - first) for number in numbers])
            end = start + max(spans[number][0] - first + spans[number][1] for number in numbers)
        return blocks


def overlapping(spans: Sequence[tuple[int, int, str]]) -> list[list[int]]:
    """Indices of spans of memory, (start, bytes, device), in groups that overlap, each in order of start.

    Groups come in the order of their lowest index.
    """
    groups = [[index] for index, (_, size, _) in enumerate(spans) if not size]
    taken = [index for index, (_, size, _) in enumerate(spans) if size]
    end, where = 0, ""
    for index in sorted(taken, key=lambda one: (spans[one][2], spans[one][0], one)):
        start, size, device = spans[index]
        if device == where and start < end:
            groups[-1].append(index)
        else:
            groups.append([index])
            end, where = start, device
        end = max(end, start + size)
    return sorted(groups, key=min)


def _span(layout: Layout) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if 0 in layout.sizes:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(layout.sizes, layout.strides, strict=True))
    return (steps + 1) * layout.dtype.itemsize


def _pieces(tensor: torch.Tensor, start: int, size: int) -> Iterator[memoryview]:
    """The memory that a tensor spans, from byte ``start`` to ``size``."""
    elements = size // tensor.dtype.itemsize
    flat = tensor.detach().as_strided((elements,), (1,)).view(torch.uint8)
    for begin in range(start, size, _CHUNK):
        yield flat[begin : begin + _CHUNK].cpu().numpy().data


class TensorFile:
    """The tensors of an artifact that was read. Each is made when first asked for and lies in the file's memory."""

    def __init__(self, listed: Sequence[tuple[Layout, int]], container: Container, member: str) -> None:
        """Raises ArtifactCorruptError where a tensor lies beyond the member."""
        self.layouts = [layout for layout, _ in listed]
        self._offsets = [offset for _, offset in listed]
        self._memory = container.member(member)
        self.container = container
        self._made: dict[int, torch.Tensor] = {}
        self.digest = container.digests[member]
        for number, (layout, offset) in enumerate(listed):
            if offset % layout.dtype.itemsize or offset + _span(layout) > len(self._memory):
                detail = f"tensor {number} lies beyond the end of {member}"
                raise ArtifactCorruptError(source=container.source, detail=detail)
        self._blocks = overlapping([(offset, _span(layout), str(layout.device)) for layout, offset in listed])

    def tensor(self, number: int) -> torch.Tensor:
        """Return a tensor. It is not to be written; ``own`` gives one that may be."""
        if number not in self._made:
            layout = self.layouts[number]
            start, size = self._offsets[number], _span(layout)
            self._made[number] = _tensor(self._memory[start : start + size], layout, self.container.memory)
        return self._made[number]

    def own(self, written: Collection[int]) -> dict[int, torch.Tensor]:
        """Copies that may be written of these tensors and of those that share memory with them, each memory once."""
        made: dict[int, torch.Tensor] = {}
        for numbers in self._blocks:
            if not frozenset(written).isdisjoint(numbers):
                made |= self._copies(numbers)
        return made

    def _copies(self, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """The tensors of one memory in a copy of it."""
        ends = [self._offsets[number] + _span(self.layouts[number]) for number in numbers]
        start = self._offsets[numbers[0]] // ALIGNMENT * ALIGNMENT
        device = self.layouts[numbers[0]].device
        memory = torch.empty(max(ends) - start, dtype=torch.uint8, device=device)
        whole = Layout(torch.uint8, (len(memory),), (1,), device)
        memory.copy_(_tensor(self._memory[start : max(ends)], whole, self.container.memory))
        return {number: self._placed(memory, number, start) for number in numbers}

    def _placed(self, memory: torch.Tensor, number: int, start: int) -> torch.Tensor:
        """A tensor in memory that has the file's bytes from ``start`` on."""
        layout, begin = self.layouts[number], self._offsets[number] - start
        flat = memory[begin : begin + _span(layout)].view(layout.dtype)
        return flat.as_strided(layout.sizes, layout.strides)


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
