"""Reads the header of a GGUF file: metadata, and the place of each tensor.

The package ``gguf`` has a reader too. It makes an array for each item of a list: 25 s and 700 MB for the metadata of
a file with 150000 tokens. This one takes a fraction of a second, and finds a truncated file before a tensor is read.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dlinfer.errors import ModelFolderError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_COPY_AGAIN = "copy or download the file again"


@dataclass(frozen=True)
class Entry:
    """The header's entry for one tensor.

    type: GGUF's number of its type. shape: sizes in torch's order. begin: the offset of its first byte in the file.
    row_bytes: the size of a row in bytes. A row is the last dimension.
    """

    name: str
    type: int
    shape: tuple[int, ...]
    begin: int
    row_bytes: int

    @property
    def rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file. metadata: the values by their keys. tensors: the entries by their names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Entry]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a GGUF file, by its name."""
    return Path(path).suffix.lower() == SUFFIX


def unusable(path: Path, detail: str, advice: str = _COPY_AGAIN) -> ModelFolderError:
    """Return the error for a GGUF file that cannot be served. detail: the fault. advice: the user's next step."""
    return ModelFolderError(path=str(path), detail=detail, advice=advice)


def read(path: Path) -> Header:
    """Return the header of a GGUF file. Raises ModelFolderError if the file is damaged or of an unknown version.

    A file with another size or date is read anew; else the last headers are kept.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise unusable(
            path, f"it cannot be read ({error.strerror})", "check the path and the access"
        ) from None
    return _read(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=2)
def _read(path: Path, size: int, _: int) -> Header:
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise unusable(path, "it is no GGUF file: it does not begin with the letters GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            return _parse(path, _Cursor(path, mapping), size)


class _Cursor:
    """Reads values from a mapped file, one behind the other. Raises ModelFolderError where the file ends early."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self._path, self._mapping, self.at = path, mapping, len(_MAGIC)

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}") * count
        self._require(size)
        self.at += size
        return struct.unpack_from(f"<{count}{form}", self._mapping, self.at - size)

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def string(self) -> str:
        size = self.number("Q")
        self._require(size)
        self.at += size
        return self._mapping[self.at - size : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """Return a value of metadata. kind: GGUF's number of its type."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            self._require(count)  # each item takes a byte at least
            if inner in _FORMATS:
                return list(self.numbers(_FORMATS[inner], count))
            return [self.value(inner) for _ in range(count)]
        if kind not in _FORMATS:
            raise unusable(self._path, f"its metadata is damaged (a value of the unknown type {kind})")
        return self.number(_FORMATS[kind])

    def _require(self, size: int) -> None:
        if size > len(self._mapping) - self.at:
            raise unusable(self._path, "it is truncated: it ends within its header")


def _parse(path: Path, cursor: _Cursor, size: int) -> Header:
    version, tensor_count, value_count = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
    if version not in _VERSIONS:
        detail = f"it is of GGUF version {version}, and versions {' and '.join(map(str, _VERSIONS))} are read"
        raise unusable(
            path, detail, "convert the model again with a current llama.cpp, on a little-endian machine"
        )
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    infos = [_info(path, cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise unusable(path, f"its metadata is damaged (general.alignment = {alignment!r})")
    begin = -(-cursor.at // alignment) * alignment
    tensors = {entry.name: entry for entry in _entries(path, infos, begin)}
    behind = max((entry.begin + entry.nbytes for entry in tensors.values()), default=0)
    if behind > size:
        raise unusable(path, f"it is truncated: it has {size} of {behind} bytes")
    if metadata.get("split.count", 1) > 1:
        advice = "join the parts with llama.cpp's `llama-gguf-split --merge`, and serve the result"
        raise unusable(path, f"it is one of {metadata['split.count']} parts of a split model", advice)
    return Header(path, metadata, tensors)


def _info(path: Path, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, count = cursor.string(), cursor.number("I")
    if not 1 <= count <= 4:
        raise unusable(path, f"its header is damaged (tensor {name!r} has {count} dimensions)")
    sizes = cursor.numbers("Q", count)
    return name, tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q")


def _entries(path: Path, infos: list[tuple[str, tuple[int, ...], int, int]], begin: int) -> Iterator[Entry]:
    sizes = type_sizes(path)
    for name, shape, kind, offset in infos:
        if kind not in sizes:
            advice = "upgrade the package gguf, or use a file of another quantisation, such as Q4_K_M"
            raise unusable(
                path, f"tensor {name} is of type {kind}, which the package gguf does not know", advice
            )
        numbers, nbytes = sizes[kind]
        if shape[-1] % numbers:
            detail = f"tensor {name} has rows of {shape[-1]} numbers, which are no whole blocks of {numbers}"
            raise unusable(path, f"its header is damaged ({detail})")
        yield Entry(name, kind, shape, begin + offset, shape[-1] // numbers * nbytes)


def type_sizes(path: Path) -> dict[int, tuple[int, int]]:
    """Return GGUF's number of each type -> (numbers in a block, bytes of a block). Asks the package ``gguf``.

    Raises ModelFolderError if the package is not installed. path: the file, for the error's text.
    """
    try:
        import gguf
    except ImportError:
        advice = 'run `pip install "dlinfer[gguf]"`'
        raise unusable(path, "the package gguf is not installed", advice) from None
    return {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}


def type_name(kind: int) -> str:
    """Return llama.cpp's name of a type, such as Q4_K. kind: GGUF's number of the type."""
    import gguf

    return gguf.GGMLQuantizationType(kind).name
