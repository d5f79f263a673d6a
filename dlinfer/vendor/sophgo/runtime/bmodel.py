"""Read a bmodel's description (chip, devices, working memory) before the bmodel is loaded, and detect truncated files.

A bmodel has a header, a flatbuffer and binary data. The header is four 32-bit numbers: a magic number, and the sizes of
the header, the flatbuffer and the data. The schema of the flatbuffer is public:
include/tpu_mlir/Builder/BM168x/bmodel.fbs of tpu-mlir."""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from dlinfer.vendor.sophgo.errors import SophgoModelError
from dlinfer.vendor.sophgo.runtime.flatbuffer import Table

_MAGIC = 0xFF55AAEE
_HEADER = struct.Struct("<4I")
_CHIP, _NETS, _DEVICES = 3, 4, 7  # numbers of fields in the table Model,
_NAME, _STAGES = 0, 3  # in Net,
_MEMORY, _WEIGHTS, _MEMORY_PARTS = 3, 4, 14  # in NetParameter, a stage: ctx_size, coeff_mem, ctx_sizes,
_WEIGHTS_DATA, _WEIGHTS_DECRYPTED = 2, 5  # in CoeffMem
_MOST = 64 * 2**20  # a flatbuffer without the binary data is far smaller


@dataclass(frozen=True)
class Header:
    """The description of a bmodel.

    chip: the file's name for its chip. devices: the number of devices that the bmodel needs.
    memory: network's name -> for each stage, the sizes in bytes of the parts of its working memory.
    weights: the sizes in bytes of the weights of all stages."""

    chip: str
    devices: int
    memory: Mapping[str, tuple[tuple[int, ...], ...]]
    weights: frozenset[int]

    def working(self) -> set[int]:
        """Return all sizes in bytes of blocks of working memory that BMRuntime may allocate."""
        return {size for stages in self.memory.values() for parts in stages for size in parts} - {0}


def read_file(path: Path) -> Header:
    """Return the description of a bmodel file. Raises SophgoModelError if the file is missing or damaged."""
    try:
        # Opening a pipe may hang; no path has a zero byte.
        if "\0" in str(path) or (path.exists() and not path.is_file()):
            raise _unsound(str(path), "it is not a file", "check the path")
        with path.open("rb") as file:
            return _parsed(str(path), file, path.stat().st_size)
    except OSError as error:
        raise _unsound(str(path), error.strerror or str(error), "check the path") from None


def read_bytes(data: bytes | bytearray | memoryview) -> Header:
    """Return the description of a bmodel in memory. Raises SophgoModelError if it is damaged."""
    return _parsed("in memory", BytesIO(data), len(data))


def _parsed(source: str, file: BinaryIO, size: int) -> Header:
    start = file.read(_HEADER.size)
    if len(start) < _HEADER.size:
        raise _unsound(source, "it is shorter than a header")
    magic, header, flat, binary = _HEADER.unpack(start)
    if magic != _MAGIC:
        raise _unsound(source, "it does not start like a bmodel")
    needed = header + flat + binary
    if flat > _MOST or header < _HEADER.size or needed > size:
        raise _unsound(source, f"it has {size} bytes but its header says {needed}")
    file.seek(header)
    try:
        return _header(Table.root(file.read(flat)))
    except (struct.error, IndexError, UnicodeDecodeError):
        raise _unsound(source, "its description cannot be read") from None


def _header(model: Table) -> Header:
    chip = model.text(_CHIP)
    if chip is None:
        raise IndexError("no chip")
    nets = [(net.text(_NAME) or "", net.tables(_STAGES)) for net in model.tables(_NETS)]
    memory = {name: tuple(map(_working_memory, stages)) for name, stages in nets}
    weights = {size for _, stages in nets for stage in stages for size in _weight_bytes(stage)}
    return Header(chip, max(1, model.number(_DEVICES)), memory, frozenset(weights))


def _working_memory(stage: Table) -> tuple[int, ...]:
    """Return the sizes in bytes of the parts of a stage's working memory.

    If the file lists no parts, it is one part."""
    parts = stage.numbers(_MEMORY_PARTS, "<Q")
    return (stage.number(_MEMORY, "<Q"),) if parts is None else parts


def _weight_bytes(stage: Table) -> Iterator[int]:
    """Yield two sizes in bytes of a stage's weights: their size in the file, and their size after decryption."""
    for weights in stage.table(_WEIGHTS):
        yield weights.number(_WEIGHTS_DATA, "<8xQ")  # a structure: start, size
        yield weights.number(_WEIGHTS_DECRYPTED, "<Q")


def _unsound(source: str, detail: str, advice: str = "compile or copy it again") -> SophgoModelError:
    return SophgoModelError(source=source, detail=detail, advice=advice)
