"""Tensors of a safetensors file that is mapped to be read, each given back to the system when the next is asked for.

safetensors maps a file for torch as one that may be written to, which Linux refuses where it is larger than the memory,
and keeps what was read resident until the file is closed: a checkpoint that is packed while it loads would be in memory
twice, in floats and packed. Format: 8 bytes of length, little-endian, then as much JSON: name -> dtype, shape and
offsets (https://github.com/huggingface/safetensors, "Format").
"""

import json
import mmap
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.refusing import refuse

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Those of a whole byte or more that torch has: several numbers in a byte (F4, F6) have another shape in torch."""


def tensors(path: str | Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(prefix and name, tensor) of a file that is known to be whole, in the order in which they lie.

    A tensor is a view of the file, never to be written to. It may be kept: what is read of it later comes from the
    file again. Raises UnsupportedFeatureError, before the first tensor, where one has a dtype that is not known.
    """
    header, first, mapping = _opened(path)
    _check_dtypes(Path(path), header)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = (first + offset for offset in entry["data_offsets"])
        yield f"{prefix}{name}", _tensor(mapping, begin, entry)
        _give_back(mapping, begin, end)


def tensor(path: str | Path, name: str) -> Tensor:
    """One tensor of a file, a view of it, never to be written to. Raises KeyError."""
    header, first, mapping = _opened(path)
    return _tensor(mapping, first + header[name]["data_offsets"][0], header[name])


def empty_tensors(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor on torch's device ``meta``) of a file. A dtype that torch lacks counts as bytes."""
    header, _, _ = _opened(path)
    for name, entry in header.items():
        dtype = _DTYPES.get(entry["dtype"], torch.uint8)
        yield name, torch.empty(entry["shape"], dtype=dtype, device="meta")


def _opened(path: str | Path) -> tuple[dict[str, Any], int, mmap.mmap]:
    """(header without metadata, offset of the first number, the mapped file)."""
    with Path(path).open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    return header, 8 + length, mapping


def _check_dtypes(path: Path, header: dict[str, Any]) -> None:
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise refuse(
                f"dtype {entry['dtype']} of tensor {name!r} in {path}, while weights are packed as they load,",
                "unset DLINFER_CPU_WEIGHTS, or give a checkpoint whose weights are all in floats",
            )


def _tensor(mapping: mmap.mmap, begin: int, entry: dict[str, list[int]]) -> Tensor:
    dtype, shape = _DTYPES[str(entry["dtype"])], entry["shape"]
    count = 1
    for size in shape:
        count *= size
    if not count:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=begin).view(shape)


def _give_back(mapping: mmap.mmap, begin: int, end: int) -> None:
    """Let the system have the pages that lie between two bytes of a file; those that others share are read again."""
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED, first, end - first)
