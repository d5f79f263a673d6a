"""What a bmodel says of itself before it is loaded: for which chip and how many devices, and whether it is whole.

The file, by the public schema of sophgo/tpu-mlir (include/tpu_mlir/Builder/BM168x/bmodel.fbs): a header of four
32-bit numbers (magic, size of the header, of the flatbuffer, of the binary data), the flatbuffer, the data.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dlinfer.vendor.sophgo.errors import SophgoModelError

_MAGIC = 0xFF55AAEE
_HEADER = struct.Struct("<4I")
_CHIP, _DEVICES = 3, 7  # numbers of fields in the table Model
_MOST = 64 * 2**20  # a flatbuffer without the binary data is far smaller
_ADVICE = "compile or copy it again"
_PATH_ADVICE = "check the path"


@dataclass(frozen=True)
class Header:
    """The chip as the file names it, and how many devices it runs on."""

    chip: str
    devices: int


def read_file(path: Path) -> Header:
    """The header of a file. Raises SophgoModelError where there is no sound bmodel."""
    try:
        # Opening a pipe may wait for ever; no path has a zero byte.
        if "\0" in str(path) or (path.exists() and not path.is_file()):
            raise SophgoModelError(source=str(path), detail="it is no file", advice=_PATH_ADVICE)
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(_HEADER.size)
            return _parsed(str(path), start, size, lambda at, count: (file.seek(at), file.read(count))[1])
    except OSError as error:
        detail = error.strerror or str(error)
        raise SophgoModelError(source=str(path), detail=detail, advice=_PATH_ADVICE) from None


def read_bytes(data: bytes | bytearray | memoryview) -> Header:
    """The header of a bmodel in memory. Raises SophgoModelError where there is no sound bmodel."""
    view = memoryview(data)
    parts = bytes(view[: _HEADER.size])
    return _parsed("in memory", parts, len(view), lambda at, count: bytes(view[at : at + count]))


def _parsed(source: str, start: bytes, size: int, read: Callable[[int, int], bytes]) -> Header:
    if len(start) < _HEADER.size:
        raise _unsound(source, "it has not even a header")
    magic, header, flat, binary = _HEADER.unpack(start)
    if magic != _MAGIC:
        raise _unsound(source, "it does not begin as a bmodel does")
    if flat > _MOST or header < _HEADER.size or header + flat + binary > size:
        needed = header + flat + binary
        raise _unsound(source, f"it has {size} bytes and by its header should have {needed}")
    try:
        return _fields(read(header, flat))
    except (struct.error, IndexError, UnicodeDecodeError):
        raise _unsound(source, "its description cannot be read") from None


def _fields(flat: bytes) -> Header:
    """A flatbuffer: a root offset; a table points back to its list of fields' offsets."""
    (table,) = struct.unpack_from("<I", flat, 0)
    fields = table - struct.unpack_from("<i", flat, table)[0]
    (length,) = struct.unpack_from("<H", flat, fields)

    def place(number: int) -> int:
        at = 4 + 2 * number
        offset = struct.unpack_from("<H", flat, fields + at)[0] if at < length else 0
        return table + offset if offset else 0

    text = place(_CHIP)
    if not text:
        raise IndexError
    start = text + struct.unpack_from("<I", flat, text)[0]
    (count,) = struct.unpack_from("<I", flat, start)
    chip = flat[start + 4 : start + 4 + count].decode("ascii")
    devices = struct.unpack_from("<I", flat, place(_DEVICES))[0] if place(_DEVICES) else 0
    return Header(chip, max(1, devices))


def _unsound(source: str, detail: str) -> SophgoModelError:
    return SophgoModelError(source=source, detail=detail, advice=_ADVICE)
