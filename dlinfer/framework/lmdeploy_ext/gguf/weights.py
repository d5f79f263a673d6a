"""Reads the tensors of a GGUF file one by one from the mapped file, as blocks or as floating-point numbers."""

import mmap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.errors import in_short
from dlinfer.framework.lmdeploy_ext.gguf import names
from dlinfer.framework.lmdeploy_ext.gguf.names import Source
from dlinfer.framework.lmdeploy_ext.gguf.reader import read, type_name, unusable

_FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
"""GGUF's number of a type -> torch's dtype, for types without blocks."""

_AT_A_TIME = 2**22
"""How many numbers the package ``gguf`` reads at a time, so that temporary arrays take only some megabytes."""


def is_float(kind: int) -> bool:
    """Return whether a type has floating-point numbers, not blocks. kind: GGUF's number of the type."""
    return kind in _FLOATS


def stored_dtype(kind: int) -> torch.dtype:
    """Return the dtype of a type's numbers, which for blocks is float32."""
    return _FLOATS.get(kind, torch.float32)


def sources(path: Path) -> dict[str, Source]:
    """Return the checkpoint's name -> source of all tensors of a GGUF file."""
    return names.sources(read(path))


def empty_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on torch's device ``meta``) for each tensor, with its unpacked shape."""
    for name, source in sources(path).items():
        yield name, torch.empty(source.shape, dtype=stored_dtype(source.entry.type), device="meta")


def lookup(path: Path) -> Callable[[str], Tensor]:
    """Return a function from a tensor's name to the unpacked tensor. Its dtype is the stored one; of blocks float32."""
    named = sources(path)

    def tensor(name: str) -> Tensor:
        source = named[name]
        return _Reader(path).numbers(source, stored_dtype(source.entry.type))

    return tensor


def tensors(
    path: Path, prefix: str, keeps: Callable[[str], bool], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (prefix + name, tensor, whether it is in blocks) for each tensor, with little memory.

    keeps: returns whether a tensor stays in blocks. It is then uint8 [rows, bytes of a row], and must not be written
    to. dtype: the dtype of all others, which are new tensors. Gemma's norms are in float32, because LMDeploy adds one
    to them.
    """
    reader = _Reader(path)
    for name, source in sources(path).items():
        named = f"{prefix}{name}"
        if keeps(named):
            yield named, reader.blocks(source), True
        else:
            yield named, reader.numbers(source, torch.float32 if source.minus_one else dtype), False
        reader.release(source)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _bytes(self, source: Source) -> Tensor:
        """Return a tensor's bytes as a view of the file, uint8 [rows, bytes of a row], in the file's order."""
        entry = source.entry
        if not entry.nbytes:
            return torch.empty(entry.rows, entry.row_bytes, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._mapping, dtype=torch.uint8, count=entry.nbytes, offset=entry.begin)
        return flat.view(entry.rows, entry.row_bytes)

    def blocks(self, source: Source) -> Tensor:
        """Return the bytes of a tensor in the checkpoint's order, uint8 [rows, bytes of a row]."""
        order, stored = source.row_order(), self._bytes(source)
        return stored if order is None else stored[torch.from_numpy(order)]

    def numbers(self, source: Source, dtype: torch.dtype) -> Tensor:
        """Return the numbers of a tensor: a new tensor of ``dtype``, in the checkpoint's order and shape."""
        from dlinfer.ops.quantised import gguf  # the ops must not load at every import of LMDeploy

        stored, kind = self._bytes(source), source.entry.type
        if kind in gguf.TYPES:
            wide = torch.float32 if source.minus_one else dtype
            numbers = gguf.values(gguf.TYPES[kind], stored, wide)
        else:
            numbers = self._by_package(stored, kind, dtype)
        if source.minus_one:
            numbers = numbers.sub_(1).to(dtype)
        order = source.row_order()
        numbers = numbers.view(source.shape)
        return numbers if order is None else numbers[torch.from_numpy(order)]

    def _by_package(self, stored: Tensor, kind: int, dtype: torch.dtype) -> Tensor:
        import gguf

        parts: list[Any] = []
        try:
            for some in stored.split(max(_AT_A_TIME // max(stored.shape[1], 1), 1)):
                numbers = gguf.dequantize(some.numpy(), gguf.GGMLQuantizationType(kind))
                parts.append(torch.from_numpy(numbers).to(dtype))
        except Exception as error:
            detail = f"the package gguf cannot read its tensors of type {type_name(kind)} ({in_short(error)})"
            advice = "upgrade the package gguf, or use a file of another quantisation, such as Q4_K_M"
            raise unusable(self._path, detail, advice) from error
        return torch.cat(parts)

    def release(self, source: Source) -> None:
        """Give the pages of a tensor back to the system. A later access reads them from the file again."""
        entry = source.entry
        first = entry.begin // mmap.PAGESIZE * mmap.PAGESIZE
        if entry.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, first, entry.begin + entry.nbytes - first)
