"""The weights of an artifact, in one member. The member keeps each tensor's strides, so that readers need no copy."""

import ctypes
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from dlinfer.errors import ArtifactCorruptError, ArtifactStorageError
from dlinfer.graph.codec.arguments import CodecError, Json, device_of, dtype_of, short_name
from dlinfer.graph.codec.graph import Layout
from dlinfer.graph.ir.conj_neg import is_lazy
from dlinfer.runtime.artifact.container import ALIGNMENT, Container, Member
from dlinfer.runtime.artifact.sealing import Buffer

PLAIN_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *"bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16".split(),
        *"float32 float64 complex64 complex128".split(),
        *"float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split(),
    )
)
"""The dtypes that a tensor in a file may have. An element of each takes whole bytes, never a part of a byte."""

_CHUNK = 1 << 24


@dataclass
class TensorTable:
    """The tensors to write.

    Tensors that overlap in memory overlap in the file, so that shared memory is written once.
    """

    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    _known: dict[tuple[int, Layout], int] = field(default_factory=dict[tuple[int, Layout], int])

    def add(self, tensor: torch.Tensor) -> int:
        """Add a tensor and return its index. Two tensors with equal address and layout get the same index."""
        detail = ""
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            detail = f"its layout is {tensor.layout}, on device {tensor.device}"
        elif is_lazy(tensor):
            detail = "torch holds it lazily conjugated or negated: call resolve_conj() or resolve_neg()"
        if detail:
            raise ArtifactStorageError(what="a weight", detail=detail)
        key = (tensor.data_ptr() or len(self.tensors), Layout.of(tensor))
        number = self._known.setdefault(key, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return number

    def offsets(self) -> dict[int, int]:
        """Return tensor index -> byte offset in the member. The order is the order of the tensors in the member."""
        spans = [(tensor.data_ptr(), Layout.of(tensor).span, str(tensor.device)) for tensor in self.tensors]
        offsets: dict[int, int] = {}
        end = 0
        for numbers in overlapping(spans):
            first = spans[numbers[0]][0]
            # Overlapping tensors keep their address modulo ALIGNMENT, so each stays aligned for its dtype.
            start = -(-end // ALIGNMENT) * ALIGNMENT + (first % ALIGNMENT if len(numbers) > 1 else 0)
            for number in numbers:
                offsets[number] = start + spans[number][0] - first
                end = max(end, offsets[number] + spans[number][1])
        return offsets

    def layouts(self, offsets: Mapping[int, int]) -> Json:
        return [
            {
                "dtype": short_name(tensor.dtype),
                "sizes": list(tensor.shape),
                "strides": list(tensor.stride()),
                "device": str(tensor.device),
                "offset": offsets[number],
            }
            for number, tensor in enumerate(self.tensors)
        ]

    def member(self, offsets: Mapping[int, int]) -> Member:
        """Return the member that holds the tensors. Its chunks are copied from the devices 16 MiB at a time."""
        ends = (offset + Layout.of(self.tensors[number]).span for number, offset in offsets.items())
        return Member(max(ends, default=0), self._chunks(offsets))

    def _chunks(self, offsets: Mapping[int, int]) -> Iterator[Buffer]:
        end = 0
        for number, offset in offsets.items():
            tensor = self.tensors[number]
            span = Layout.of(tensor).span
            yield bytes(max(0, offset - end))
            flat = tensor.detach().as_strided((span // tensor.dtype.itemsize,), (1,)).view(torch.uint8)
            for begin in range(max(0, end - offset), span, _CHUNK):
                yield flat[begin : begin + _CHUNK].cpu().numpy().data
            end = max(end, offset + span)


def overlapping(spans: Sequence[tuple[int, int, str]]) -> list[list[int]]:
    """Return the indices of ``spans`` in groups. Spans in a group overlap; spans of different groups do not.

    spans: (start, number of bytes, device) of each span of memory. A group is sorted by start. The groups are sorted by
    their lowest index.
    """
    groups = [[index] for index, (_, size, _) in enumerate(spans) if not size]
    taken = [index for index, (_, size, _) in enumerate(spans) if size]
    end, where = 0, ""
    for index in sorted(taken, key=lambda index: (spans[index][2], spans[index][0], index)):
        start, size, device = spans[index]
        if device == where and start < end:
            groups[-1].append(index)
        else:
            groups.append([index])
            end, where = start, device
        end = max(end, start + size)
    return sorted(groups, key=min)


def read_layouts(items: Json) -> list[tuple[Layout, int]]:
    """Return (layout, offset) of each tensor that ``TensorTable.layouts`` wrote. Raises CodecError."""
    layouts: list[tuple[Layout, int]] = []
    for item in items:
        sizes, strides, offset = item["sizes"], item["strides"], item["offset"]
        numbers = [*sizes, *strides, offset]
        if len(sizes) != len(strides) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
            raise CodecError("the sizes of a tensor are not numbers")
        dtype = dtype_of(item["dtype"])
        if dtype not in PLAIN_DTYPES:
            raise CodecError(f"a tensor has dtype {dtype}, which artifacts never hold")
        layouts.append((Layout(dtype, tuple(sizes), tuple(strides), device_of(item["device"])), offset))
    return layouts


class TensorFile:
    """The tensors of an artifact from a file. CPU tensors use the file's memory.

    Other tensors are copied to their device.
    """

    def __init__(self, placed: Sequence[tuple[Layout, int]], container: Container, member: str) -> None:
        """Check that the tensors lie inside a member and are aligned.

        placed: (layout, offset in the member) of each tensor. Raises ArtifactCorruptError for a tensor that is
        misaligned or ends beyond the member.
        """
        self.layouts = [layout for layout, _ in placed]
        self.container = container
        self.digest = container.digests[member]
        self._offsets = [offset for _, offset in placed]
        self._memory = _writable(container.member(member))
        self._tensors: dict[int, torch.Tensor] = {}
        for number, (layout, offset) in enumerate(placed):
            if offset % layout.dtype.itemsize or offset + layout.span > len(self._memory):
                detail = f"tensor {number} is misaligned, or ends beyond the end of {member}"
                raise ArtifactCorruptError(source=container.source, detail=detail)
        self._blocks = overlapping([(offset, layout.span, str(layout.device)) for layout, offset in placed])

    def tensor(self, number: int) -> torch.Tensor:
        """Return the tensor with this index.

        Callers must not write it: ``copies`` returns tensors that may be written.
        """
        if number not in self._tensors:
            layout, start = self.layouts[number], self._offsets[number]
            memory = self._bytes(start, start + layout.span)
            self._tensors[number] = _laid_out(memory, layout).to(layout.device)
        return self._tensors[number]

    def copies(self, written: Collection[int]) -> dict[int, torch.Tensor]:
        """Return index -> copy, for the tensors with the indices ``written`` and for all tensors that overlap them.

        The copies overlap each other as the tensors do.
        """
        copies: dict[int, torch.Tensor] = {}
        for numbers in self._blocks:
            if frozenset(written).isdisjoint(numbers):
                continue
            spans = {number: (self._offsets[number], self.layouts[number].span) for number in numbers}
            start = self._offsets[numbers[0]] // ALIGNMENT * ALIGNMENT
            end = max(offset + size for offset, size in spans.values())
            memory = self._bytes(start, end).to(self.layouts[numbers[0]].device, copy=True)
            for number, (offset, size) in spans.items():
                part = memory[offset - start : offset - start + size]
                copies[number] = _laid_out(part, self.layouts[number])
        return copies

    def _bytes(self, start: int, end: int) -> torch.Tensor:
        memory = self._memory[start:end]
        return torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)


def _laid_out(memory: torch.Tensor, layout: Layout) -> torch.Tensor:
    return memory.view(layout.dtype).as_strided(layout.sizes, layout.strides)


def _writable(memory: memoryview) -> memoryview:
    """Return the same memory, not marked as read-only, because torch warns about read-only buffers."""
    if not memory.readonly or not len(memory):
        return memory
    array = numpy.frombuffer(memory, numpy.uint8)
    unmarked: Any = (ctypes.c_char * len(memory)).from_address(array.ctypes.data)
    unmarked.owner = array  # the bytes must live as long as the tensors
    return memoryview(unmarked).cast("B")
