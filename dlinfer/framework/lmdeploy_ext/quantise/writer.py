"""Writes a safetensors file tensor by tensor, in any order, so that only one tensor is in memory at a time.

safetensors' own writer needs all tensors of a file at once. ``conversion.model_files`` describes the format.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.model_files import DTYPES

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name of a tensor -> (safetensors' name of its dtype, its shape)."""


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes. dtype: safetensors' name of it."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def header(layout: Layout) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the bytes of a file's header, and a mapping: tensor's name -> (offset of its first byte, number of bytes).

    Tensors with wider dtypes come first, as in files of the package safetensors, so that all tensors are aligned.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name in sorted(layout, key=lambda name: (-DTYPES[layout[name][0]].itemsize, name)):
        dtype, shape = layout[name]
        begin, end = end, end + nbytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        places[name] = begin, end - begin
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    return start, {name: (len(start) + begin, size) for name, (begin, size) in places.items()}


class ShardWriter:
    """Writes one safetensors file. Use it in a ``with`` block, and write each tensor of the layout once."""

    def __init__(self, path: Path, layout: Layout) -> None:
        start, self._places = header(layout)
        self._file = path.open("wb")
        self._file.write(start)

    def write(self, name: str, tensor: Tensor) -> None:
        begin, size = self._places.pop(name)
        numbers = tensor.contiguous().flatten().view(torch.uint8).numpy()
        assert numbers.nbytes == size, f"{name} has {numbers.nbytes} bytes instead of the planned {size}"
        self._file.seek(begin)
        self._file.write(numbers.data)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                assert not self._places, f"never written: {sorted(self._places)}"
                self._file.flush()
                os.fsync(self._file.fileno())
