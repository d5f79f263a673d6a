"""Reads a model folder: its JSON files, and the names, sizes and values of its tensors.

A safetensors file begins with the length of its header, in 8 bytes, little-endian. The header is a JSON object: tensor
name -> dtype, shape and offsets. The bytes of the tensors follow. See https://github.com/huggingface/safetensors,
"Format".
"""

import json
import math
import mmap
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.gguf import reader, weights

NAMES = tuple(
    f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json")
)
"""Names of weight files and their indexes, in LMDeploy's search order."""

_WIDE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FLOATING = tuple(_WIDE)
"""safetensors' names of the dtypes of unquantised weights."""

DTYPES = _WIDE | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
}
"""safetensors' name of a dtype -> torch's dtype. Dtypes with several numbers in a byte (F4, F6) are left out."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, which may begin with a byte-order mark.

    Raises OSError if the file cannot be read, and ValueError if it holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return content


def readable_config(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json; an empty dict if the file cannot be read.

    No error is needed here, because ``check_model_folder`` reports it.
    """
    try:
        return read_json(folder / "config.json")
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True)
class Stored:
    """The header's entry for one tensor of a safetensors or GGUF file.

    dtype: safetensors' name of the dtype, or llama.cpp's name of a type with blocks. begin: the file offset of the
    tensor's first byte. of_blocks: the size of blocks in bytes; 0 for a dtype of safetensors.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    of_blocks: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the tensor in the file, in bytes."""
        return self.of_blocks or self.elements * DTYPES[self.dtype].itemsize


def index_or_file(folder: Path) -> str | None:
    """Return the name of the file that LMDeploy reads first: the weight file or its index; None if neither exists."""
    return next((name for name in NAMES if (folder / name).is_file()), None)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that LMDeploy loads: the single file, or all files that the index names.

    A folder may hold further weight files. Mistral's ``consolidated.safetensors`` holds all weights a second time.
    """
    name = index_or_file(folder)
    if name is None or not name.endswith(".index.json"):
        return [] if name is None else [folder / name]
    return [folder / file for file in sorted(set(read_json(folder / name)["weight_map"].values()))]


def is_pickled(path: Path) -> bool:
    """Return whether a weight file is pickled by torch. All others are in safetensors' format or GGUF."""
    return path.suffix != ".safetensors" and not reader.is_gguf(path)


# --- headers


def header(path: Path) -> dict[str, Stored]:
    """Return tensor name -> entry of a safetensors or GGUF file, in the order of the bytes. Do not change the result.

    The file must be complete. The last two headers are kept, and a file with another size or date is read anew.
    """
    if reader.is_gguf(path):
        return {name: _of_gguf(source, path) for name, source in weights.sources(path).items()}
    state = path.stat()
    return _header(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=2)
def _header(path: Path, size: int, changed: int) -> dict[str, Stored]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    tensors = (
        Stored(name, path.name, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in entries.items()
    )
    return {stored.name: stored for stored in sorted(tensors, key=lambda stored: stored.begin)}


def _of_gguf(source: weights.Source, path: Path) -> Stored:
    entry = source.entry
    of_blocks = 0 if weights.is_float(entry.type) else entry.nbytes
    return Stored(
        source.name, path.name, reader.type_name(entry.type), entry.shape, entry.begin, of_blocks=of_blocks
    )


def read(folder: Path) -> list[Stored]:
    """Return the entries of all tensors in the weight files that LMDeploy loads.

    Pickled files are skipped. The other files must be complete.
    """
    stored: dict[str, Stored] = {}
    for path in weight_files(folder):
        stored |= {} if is_pickled(path) else header(path)
    return list(stored.values())


def loaded_bytes(tensors: list[Stored], itemsize: int, tied: bool) -> int:
    """Return the size in bytes of all weights in memory, if each unquantised number takes ``itemsize`` bytes.

    tied: whether the model uses the embedding as output projection. Then a stored output projection is not counted.
    """
    others = [stored for stored in tensors if not stored.name.endswith("lm_head.weight")]
    loaded = others if tied and others else tensors
    return sum(stored.elements * itemsize if stored.dtype in FLOATING else stored.nbytes for stored in loaded)


def largest_file(folder: Path) -> int:
    """Return the size of the largest weight file in bytes. LMDeploy maps one whole file at a time while loading."""
    return max((path.stat().st_size for path in weight_files(folder)), default=0)


def largest_tensor(tensors: list[Stored]) -> int:
    """Return the size of the largest tensor in bytes. ``tensors`` keeps at most one tensor of a file in memory."""
    return max((stored.nbytes for stored in tensors), default=0)


# --- tensors


def empty_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on torch's device ``meta``) for each tensor of a weight file.

    A dtype that torch lacks becomes uint8. A broken pickled file raises torch's own error.
    """
    if is_pickled(path):
        yield from _pickled(path, "meta").items()
        return
    if reader.is_gguf(path):
        yield from weights.empty_tensors(path)
        return
    for name, stored in header(path).items():
        dtype = DTYPES.get(stored.dtype, torch.uint8)
        yield name, torch.empty(stored.shape, dtype=dtype, device="meta")


def tensor(path: Path, name: str) -> Tensor:
    """Return one tensor of a weight file. Do not write to it, because it may be a view of the mapped file."""
    return lookup(path)(name)


def lookup(path: Path) -> Callable[[str], Tensor]:
    """Return a function from a tensor's name to the tensor, as ``tensor`` returns it. It parses the file only once."""
    if reader.is_gguf(path):
        return weights.lookup(path)
    if is_pickled(path):
        return _pickled(path, "cpu").__getitem__
    stored = header(path)
    # A mapping for each tensor: once the tensor is dropped, so are its pages.
    return lambda name: _view(_mapped(path), stored[name])


def tensors(path: str | Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (prefix + name, tensor) for each tensor of a safetensors file, with little memory.

    The package safetensors would need more memory. It maps files as writable, and Linux refuses that for a file larger
    than the memory. It also keeps pages resident until the file is closed, so a checkpoint would be in memory twice
    while it is packed. This function releases a tensor's pages before it yields the next tensor.

    Each tensor is a view of the file, so do not write to it. You may keep it: a later access reads its pages from the
    file again. Raises UnsupportedFeatureError, before the first tensor, for a dtype that is not in ``DTYPES``.
    """
    path = Path(path)
    tensors = header(path).values()
    for stored in tensors:
        if stored.dtype not in DTYPES:
            what = f"dtype {stored.dtype} of tensor {stored.name!r} in {path}, while weights are packed as they load,"
            raise refuse(
                what, "unset DLINFER_CPU_WEIGHTS, or use a checkpoint whose weights are all in floats"
            )
    mapping = _mapped(path)
    for stored in tensors:
        yield f"{prefix}{stored.name}", _view(mapping, stored)
        first = stored.begin // mmap.PAGESIZE * mmap.PAGESIZE
        if stored.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED, first, stored.begin + stored.nbytes - first)


def _pickled(path: Path, device: str) -> dict[str, Tensor]:
    # torch can map its zip format only; it reads files in the older format as a whole.
    return torch.load(path, map_location=device, weights_only=True, mmap=zipfile.is_zipfile(path))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _view(mapping: mmap.mmap, stored: Stored) -> Tensor:
    dtype = DTYPES[stored.dtype]
    if not stored.elements:
        return torch.empty(stored.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(mapping, dtype=dtype, count=stored.elements, offset=stored.begin)
    return flat.view(stored.shape)
