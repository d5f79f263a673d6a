"""BF12: a bfloat16 matrix in 12 bits a number, without loss.

A bfloat16 number is a sign, an exponent of 8 bits and a mantissa of 7. Nearly all exponents of a weight are among 15
neighbours, so a code of 4 bits is enough: a code of 1..15 means the exponent ``base + code``. Code 0 means the exponent
0, of zeros and subnormals. A number with another exponent is an exception: it is stored whole in a list, and as +0.0 in
the matrix. Unpacking restores every bit, even of NaN.

A matrix [rows, columns] becomes one tensor uint8 [bytes]. Words and integers are little-endian, as on the machine.

1. Words, uint16 [strips, groups, 4, 96]: a strip is 4 rows, a group 128 columns; the last strip and the last group are
   filled up with zeros. The 96 words of a row in a group hold 128 numbers as four quarters of 32. Word j, 0..31, holds
   sign and mantissa of two numbers, number j of quarter 1 and number j of quarter 2:

       bit 15    bits 14..8    bit 7     bits 6..0
       sign 1    mantissa 2    sign 2    mantissa 1

   Word 32 + j holds number j of quarter 3 and number j of quarter 4 in the same way. Word 64 + j holds the codes of
   number j of each quarter, quarter 1 in the lowest bits.
2. After the words, int64: the base; ``strips + 1`` starts (the last start is the number of exceptions); the exceptions.
   Exceptions number starts[s] to starts[s + 1] - 1 belong to strip s. An exception is stored as
   ``column << 18 | row in strip << 16 | bits``. The exceptions of a strip are sorted, so they are in the
   order of columns.

The base, 0..240, is the smallest base that leaves the fewest exceptions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules, ints

STRIP = 4
"""The number of rows of a strip."""
GROUP = 128
"""The number of columns of a group."""

_WORDS = 96  # of one row in one group
_QUARTER = GROUP // 4
_CODES = 15  # exponents that have a code, without exponent 0
_BASES = 256 - _CODES
_FIELD = 0x807F
_AT_A_TIME = 2**20
"""How many numbers are packed or unpacked at a time, so that temporary tensors take only some megabytes."""

_RULES = Rules("bf12")


def packed_bytes(rows: int, columns: int, exceptions: int = 0) -> int:
    """Return the size in bytes of a packed matrix [rows, columns] with this many exceptions."""
    strips, groups = _pieces(rows, STRIP), _pieces(columns, GROUP)
    return strips * groups * STRIP * _WORDS * 2 + 8 * (strips + 2 + exceptions)


def check_packed(rules: Rules, argument: str, packed: Tensor, rows: int, columns: int) -> None:
    """Raise OpArgumentError unless ``packed`` has the dtype, shape and size of a packed matrix [rows, columns].

    The check does not read the values, so it also accepts fake tensors.
    """
    if packed.dtype is not torch.uint8:
        raise rules.error(argument, "a uint8 tensor, as dlinfer.ops.quantised.bf12 packs it", packed.dtype)
    rules.rank(argument, packed, 1)
    rules.require(packed.is_contiguous(), argument, "a contiguous tensor", packed.stride)
    beside = packed.shape[0] - packed_bytes(rows, columns)

    def expected() -> str:
        return f"{packed_bytes(rows, columns)} bytes for [{rows}, {columns}] and 8 for each exception"

    for fits in (beside >= 0, beside % 8 == 0):
        rules.require(fits, argument, expected, lambda: packed.shape[0])


# --- packing


def pack(weight: Tensor) -> Tensor:
    """Return the packed bytes of a matrix: a new tensor uint8 [bytes] on the weight's device.

    weight: [rows, columns], bfloat16, any strides.

    The weight is read twice, some rows at a time. Raises OpArgumentError.
    """
    if weight.dtype is not torch.bfloat16:
        raise _RULES.error("weight", "a bfloat16 tensor", weight.dtype)
    _RULES.rank("weight", weight, 2)
    rows, columns = weight.shape
    strips, groups = _pieces(rows, STRIP), _pieces(columns, GROUP)
    base, exceptions = _base(weight)
    packed = torch.empty(packed_bytes(rows, columns, exceptions), dtype=torch.uint8, device=weight.device)
    split = packed_bytes(rows, columns) - 8 * (strips + 2)
    words = packed[:split].view(torch.int16).view(strips, groups, STRIP, _WORDS)
    numbers = packed[split:].view(torch.int64)
    counts = torch.zeros(strips, dtype=torch.int64, device=weight.device)
    place = strips + 2
    for row, bits in _wide_rows(weight):
        exponents = bits >> 7 & 0xFF
        codes = exponents - base
        beside = (exponents != 0) & ((codes < 1) | (codes > _CODES))
        codes.masked_fill_(beside | (exponents == 0), 0)
        piece = _words(bits.masked_fill(beside, 0) & _FIELD, codes)
        strip = row // STRIP
        words[strip : strip + piece.shape[0]] = piece
        at_row, column = beside.nonzero(as_tuple=True)
        entries = column << 18 | (at_row % STRIP) << 16 | bits[at_row, column].long()
        order = entries.argsort()
        entries = entries[order[(at_row[order] // STRIP).argsort(stable=True)]]
        numbers[place : place + entries.numel()] = entries
        place += entries.numel()
        counts[strip : strip + piece.shape[0]] = torch.bincount(at_row // STRIP, minlength=piece.shape[0])
    numbers[0] = base
    numbers[1] = 0
    numbers[2 : strips + 2] = counts.cumsum(0)
    return packed


def _base(weight: Tensor) -> tuple[int, int]:
    of_exponent = torch.zeros(256, dtype=torch.int64, device=weight.device)
    for _, bits in _wide_rows(weight):
        of_exponent += torch.bincount((bits >> 7 & 0xFF).flatten(), minlength=256)
    counts = ints(of_exponent)
    coded = [sum(counts[base + 1 : base + 1 + _CODES]) for base in range(_BASES)]
    base = coded.index(max(coded))
    return base, sum(counts[1:]) - coded[base]


def _wide_rows(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the weight's bits some rows at a time: (index of the first row, bits as int32 [rows, columns])."""
    for row, count in _steps(*weight.shape):
        yield row, weight[row : row + count].contiguous().view(torch.int16).int() & 0xFFFF


def _words(fields: Tensor, codes: Tensor) -> Tensor:
    rows, columns = fields.shape
    lacking = (0, -columns % GROUP, 0, -rows % STRIP)
    shape = (_pieces(rows, STRIP), STRIP, _pieces(columns, GROUP), 4, _QUARTER)
    f0, f1, f2, f3 = torch.nn.functional.pad(fields, lacking).view(shape).unbind(-2)
    c0, c1, c2, c3 = torch.nn.functional.pad(codes, lacking).view(shape).unbind(-2)
    parts = (f0 | _swapped(f1), f2 | _swapped(f3), c0 | c1 << 4 | c2 << 8 | c3 << 12)
    return torch.cat(parts, -1).to(torch.int16).transpose(1, 2)


# --- unpacking


class _Parts(NamedTuple):
    """A packed matrix: words int16 [strips, groups, 4, 96], base, starts [strips + 1], entries [exceptions]."""

    words: Tensor
    base: Tensor
    starts: Tensor
    entries: Tensor


def unpack(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Return the unpacked matrix: a new tensor bfloat16 [rows, columns] on the device of ``packed``.

    packed: uint8 [bytes], the result of ``pack`` for a matrix [rows, columns].

    Raises OpArgumentError if the size of ``packed`` is wrong.
    """
    parts = _parts(packed, rows, columns)
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=packed.device)
    for row, count in _steps(rows, columns):
        which = torch.arange(row, row + count, device=packed.device)
        out[row : row + count] = _rows(parts, which, columns)
    return out


def rows_of(packed: Tensor, indices: Tensor, rows: int, columns: int) -> Tensor:
    """Return the unpacked rows ``indices`` of a packed matrix: a new tensor bfloat16 [*indices.shape, columns].

    packed: the result of ``pack`` for a matrix [rows, columns].
    indices: int32 or int64, each in 0..rows - 1; the range is not checked.

    Raises OpArgumentError if the size of ``packed`` is wrong.
    """
    parts = _parts(packed, rows, columns)
    which = indices.flatten().long()
    out = torch.empty(which.numel(), columns, dtype=torch.bfloat16, device=packed.device)
    for row, count in _steps(which.numel(), columns):
        out[row : row + count] = _rows(parts, which[row : row + count], columns)
    return out.view(*indices.shape, columns)


def _parts(packed: Tensor, rows: int, columns: int) -> _Parts:
    _RULES.require(rows >= 0, "rows", "0 or more", lambda: rows)
    _RULES.require(columns >= 0, "columns", "0 or more", lambda: columns)
    check_packed(_RULES, "packed", packed, rows, columns)
    strips, groups = _pieces(rows, STRIP), _pieces(columns, GROUP)
    split = packed_bytes(rows, columns) - 8 * (strips + 2)
    words = _viewed(packed[:split], torch.int16).view(strips, groups, STRIP, _WORDS)
    numbers = _viewed(packed[split:], torch.int64)
    starts, entries = numbers[1 : strips + 2], numbers[strips + 2 :]
    size = packed_bytes(rows, columns, int(starts[-1]))
    expected = f"{size} bytes for [{rows}, {columns}] with {int(starts[-1])} exceptions"
    _RULES.require(packed.shape[0] == size, "packed", expected, lambda: packed.shape[0])
    return _Parts(words, numbers[0], starts, entries)


def _viewed(some: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as integers of ``dtype``: a view, or a copy if the bytes are not aligned for a view."""
    return (some.clone() if some.storage_offset() % dtype.itemsize else some).view(dtype)


def _rows(parts: _Parts, which: Tensor, columns: int) -> Tensor:
    strip, in_strip = which // STRIP, which % STRIP
    words = parts.words[strip, :, in_strip].int() & 0xFFFF
    first, second, codes = torch.split(words, _QUARTER, -1)
    fields = torch.stack((first, _swapped(first), second, _swapped(second)), -2) & _FIELD
    codes = torch.stack([codes >> place & 0xF for place in (0, 4, 8, 12)], -2)
    exponents = torch.where(codes == 0, 0, parts.base + codes)
    bits = (fields | exponents << 7).flatten(1)[:, :columns].to(torch.int16)
    at_row, entries = _exceptions(parts, strip, in_strip)
    bits[at_row, entries >> 18] = (entries & 0xFFFF).to(torch.int16)
    return bits.contiguous().view(torch.bfloat16)


def _exceptions(parts: _Parts, strip: Tensor, in_strip: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors about the exceptions in some rows: the index of each exception's row, and each entry.

    strip, in_strip: the strip of each row, and the row's index in that strip.
    """
    begin, end = parts.starts[strip], parts.starts[strip + 1]
    count = end - begin
    at_row = torch.arange(strip.numel(), device=strip.device).repeat_interleave(count)
    before = count.cumsum(0) - count
    place = torch.arange(at_row.numel(), device=strip.device) + (begin - before)[at_row]
    entries = parts.entries[place]
    here = (entries >> 16) % STRIP == in_strip[at_row]
    return at_row[here], entries[here]


def _swapped(words: Tensor) -> Tensor:
    return (words << 8 | words >> 8) & 0xFFFF


def _steps(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Split rows into pieces of about ``_AT_A_TIME`` numbers; yield (first row, number of rows).

    Each piece except the last consists of whole strips.
    """
    step = max(_AT_A_TIME // max(columns, 1) // STRIP, 1) * STRIP
    for row in range(0, rows, step):
        yield row, min(step, rows - row)


def _pieces(count: int, size: int) -> int:
    return (count + size - 1) // size
