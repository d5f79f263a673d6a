"""A safetensors file that is written tensor by tensor, in any order, so that one tensor at a time is in memory.

Format: 8 bytes of length, little-endian, then as much JSON: name -> dtype, shape and offsets; then the numbers
(https://github.com/huggingface/safetensors, "Format").
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.headers import BITS

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name of a tensor -> safetensors' name of its dtype, and its shape."""


def header(layout: Layout) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The start of a file of these tensors, and where each lies in it: (first byte, bytes).

    Numbers of more bytes come first, which keeps all of them aligned, as safetensors' own writer does.
    """
    order = sorted(layout, key=lambda name: (-BITS[layout[name][0]], name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name in order:
        dtype, shape = layout[name]
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        places[name] = begin, end - begin
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    return start, {name: (len(start) + begin, size) for name, (begin, size) in places.items()}


class ShardWriter:
    """Writes one file; used as a context, which closes it. The file is whole once each tensor was written."""

    def __init__(self, path: Path, layout: Layout) -> None:
        start, self._places = header(layout)
        self._file = path.open("wb")
        self._file.write(start)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the layout, once."""
        begin, size = self._places.pop(name)
        numbers = tensor.contiguous().flatten().view(torch.uint8).numpy()
        if numbers.nbytes != size:
            raise AssertionError(f"{name} has {numbers.nbytes} bytes and was planned with {size}")
        self._file.seek(begin)
        self._file.write(numbers.data)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                if self._places:
                    raise AssertionError(f"never written: {sorted(self._places)}")
                self._file.flush()
                os.fsync(self._file.fileno())
