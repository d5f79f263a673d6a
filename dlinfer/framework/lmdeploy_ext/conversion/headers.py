"""What the weights of a folder are, from the headers of its files: no tensor is read.

Format of safetensors: 8 bytes of length, little-endian, then as much JSON: name -> dtype, shape and offsets
(https://github.com/huggingface/safetensors, "Format").
"""

import json
import math
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion import mapped

NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of weights and of their index, in the order in which LMDeploy's loader looks for them."""

BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "C64": 64,
    "I64": 64,
    "I32": 32,
    "I16": 16,
}
BITS |= {"I8": 8, "U8": 8, "BOOL": 8, "U16": 16, "U32": 32, "U64": 64}
_FLOATING = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Stored:
    """One tensor in a file. dtype: safetensors' name of it."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.elements * BITS[self.dtype] // 8

    def loaded(self, itemsize: int) -> int:
        """Bytes in memory where floating-point tensors become numbers of ``itemsize`` bytes."""
        return self.elements * itemsize if self.dtype in _FLOATING else self.nbytes


def found(folder: Path) -> str | None:
    """The name of the file, or of the index of files, that LMDeploy reads; None where there is none."""
    return next((name for name in NAMES if (folder / name).is_file()), None)


def weight_files(folder: Path) -> list[Path]:
    """The files that are loaded: the single one, or else those of the index. Others may lie beside them, as
    ``consolidated.safetensors`` of Mistral's checkpoints, which has all weights a second time."""
    name = found(folder)
    if name is None or not name.endswith(".index.json"):
        return [] if name is None else [folder / name]
    index = json.loads((folder / name).read_text(encoding="utf-8"))
    return [folder / one for one in sorted(set(index["weight_map"].values()))]


def empty_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor on torch's device ``meta``) of a file. Raises what torch raises for a broken pickled one."""
    if is_pickled(path):
        yield from _pickled(path, "meta").items()
    else:
        yield from mapped.empty_tensors(path)


def tensor(path: Path, name: str) -> Tensor:
    """One tensor of a file, never to be written to."""
    return _pickled(path, "cpu")[name] if is_pickled(path) else mapped.tensor(path, name)


def is_pickled(path: Path) -> bool:
    """Whether a file of weights is torch's own."""
    return path.suffix != ".safetensors"


def _pickled(path: Path, device: str) -> dict[str, Tensor]:
    # torch maps what it has written as a zip file; the older format is read as a whole.
    return torch.load(path, map_location=device, weights_only=True, mmap=zipfile.is_zipfile(path))


def read(folder: Path) -> list[Stored]:
    """Every tensor of the safetensors files that are loaded, one name once. The files are known to be whole."""
    found: dict[str, Stored] = {}
    for path in weight_files(folder):
        if is_pickled(path):
            continue
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                found[name] = Stored(name, path.name, entry["dtype"], tuple(entry["shape"]))
    return list(found.values())


def loaded_bytes(tensors: list[Stored], itemsize: int, tied: bool) -> int:
    """Bytes of all weights in memory. tied: the output projection is the embedding, and is not loaded where stored."""
    heads = [one for one in tensors if one.name.endswith("lm_head.weight")]
    left_out = set(heads) if tied and len(heads) < len(tensors) else set()
    return sum(one.loaded(itemsize) for one in tensors if one not in left_out)


def largest_file(folder: Path) -> int:
    """Bytes of the largest weight file: it is mapped as a whole while its tensors are copied."""
    return max((path.stat().st_size for path in weight_files(folder)), default=0)


def largest_tensor(tensors: list[Stored]) -> int:
    """Bytes of the largest tensor in its file: where pages are given back, so much of a file is resident."""
    return max((one.nbytes for one in tensors), default=0)
