"""GGUF: matrices in the block formats of llama.cpp, which this file reads and describes.

A row [columns] of a matrix is cut into blocks of 32 or 256 neighbours. Each block is stored as some bytes: its scales,
and its numbers in 4 to 8 bits. ``TYPES`` lists the served types. A type's ``values`` returns the float32 numbers that
the blocks stand for, with the bits that the package ``gguf`` of llama.cpp's authors gives.

A packed weight is one tensor uint8 [bytes]. It holds one or more matrices with the same number of columns, one behind
the other. LMDeploy joins layers, such as q, k and v, and GGUF files may give each another type. So an op gets the
weight with two lists: the type and the number of rows of each matrix.

Two bytes of the block types are a float16 in little-endian order, as on the machine. Formats:
github.com/ggml-org/llama.cpp, ``ggml/src/ggml-common.h``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules

_AT_A_TIME = 2**20
"""How many numbers are unpacked at a time, so that temporary tensors take only some megabytes."""


@dataclass(frozen=True)
class BlockType:
    """One type of blocks.

    name: llama.cpp's name. numbers: how many numbers a block holds. nbytes: its size in bytes.
    values: a function from blocks uint8 [blocks, nbytes] to their numbers float32 [blocks, numbers].
    """

    name: str
    numbers: int
    nbytes: int
    values: Callable[[Tensor], Tensor]

    def row_bytes(self, columns: int) -> int:
        """Return the size in bytes of a row of ``columns`` numbers, which whole blocks have to make up."""
        return columns // self.numbers * self.nbytes


# --- blocks of 32 numbers


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte ``at`` of each block, as float32 [blocks, 1]. The copy is aligned for a view."""
    return blocks[:, at : at + 2].clone().view(torch.float16).float()


def _nibbles(blocks: Tensor, begin: int, end: int, run: int) -> Tensor:
    """Return the 4-bit numbers of bytes ``begin`` to ``end``, uint8 [blocks, 2 * (end - begin)].

    Each run of ``run`` bytes holds 2 * run numbers: first the low halves of all its bytes, then the high halves.
    """
    runs = torch.unflatten(blocks[:, begin:end], 1, (-1, 1, run))
    return torch.cat([runs & 15, runs >> 4], 2).flatten(1)


def _fifth_bits(blocks: Tensor, begin: int) -> Tensor:
    """Return 16 times each of the 32 bits in the four bytes from ``begin`` on, lowest bit first: uint8 [blocks, 32]."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, begin : begin + 4, None] >> bits & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks, 2, 18, 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks, 4, 20, 16).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    numbers = _nibbles(blocks, 6, 22, 16) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (numbers.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    numbers = _nibbles(blocks, 8, 24, 16) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * numbers.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


# --- blocks of 256 numbers


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the minima of the 8 groups of a Q4_K or Q5_K block, float32 [blocks, 8, 1] each.

    The block has two float16 factors, of scales and of minima, and for each group two 6-bit numbers: in bytes 4 to 7
    and 8 to 11 those of groups 0 to 3 in the lower six bits. Bytes 12 to 15 hold the lower four bits of those of groups
    4 to 7. Their upper two bits are the upper two bits of bytes 4 to 11.
    """
    scales, minima, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([scales & 63, both & 15 | scales >> 2 & 48], 1)
    minima = torch.cat([minima & 63, both >> 4 | minima >> 2 & 48], 1)
    return (_half(blocks, 0) * scales.float())[..., None], (_half(blocks, 2) * minima.float())[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    numbers = torch.unflatten(_nibbles(blocks, 16, 144, 32).float(), 1, (8, 32))
    return (scales * numbers - minima).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    groups = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[:, None, 16:48] >> groups & 1) << 4
    numbers = (torch.unflatten(_nibbles(blocks, 48, 176, 32), 1, (8, 32)) | fifth).float()
    return (scales * numbers - minima).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    upper = (torch.unflatten(blocks[:, 128:192], 1, (2, 1, 32)) >> pairs & 3) << 4
    numbers = _nibbles(blocks, 0, 128, 64) | upper.flatten(1)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (torch.unflatten(numbers.float() - 32, 1, (16, 16)) * scales[..., None]).flatten(1)


def _floats(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.clone().view(dtype).float()


TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _floats(torch.float32)),
    1: BlockType("F16", 1, 2, _floats(torch.float16)),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _floats(torch.bfloat16)),
}
"""GGUF's number of a type -> the type."""


# --- packed weights


def packed_bytes(types: Sequence[int], rows: Sequence[int], columns: int) -> int:
    """Return the size in bytes of a packed weight of known types."""
    return sum(
        count * TYPES[int(number)].row_bytes(columns) for number, count in zip(types, rows, strict=True)
    )


def check_packed(
    rules: Rules, argument: str, packed: Tensor, types: Sequence[int], rows: Sequence[int], columns: int
) -> None:
    """Raise OpArgumentError unless ``packed``'s last dimension holds the matrices of such types and sizes.

    A single weight has to be contiguous, a stack of weights need not. The check does not read the values, so it also
    accepts fake tensors.
    """
    if packed.dtype is not torch.uint8:
        raise rules.error(
            argument, "a uint8 tensor, as dlinfer.ops.quantised.gguf describes it", packed.dtype
        )
    is_laid_out = packed.dim() > 1 or packed.is_contiguous()
    rules.require(is_laid_out, argument, "a contiguous tensor", packed.stride)
    rules.require(
        len(types) == len(rows), "rows", f"{len(types)} numbers, as many as types", lambda: len(rows)
    )
    for number, count in zip(map(int, types), rows, strict=True):  # a graph is compiled for its types
        known = ", ".join(map(str, TYPES))
        rules.require(number in TYPES, "types", f"numbers among {known}", lambda number=number: number)
        rules.require(count >= 0, "rows", "numbers of 0 or more", lambda count=count: count)
        kind = TYPES[number]
        whole = f"a multiple of {kind.numbers} columns for {kind.name}"
        rules.require(columns % kind.numbers == 0, argument, whole, lambda: columns)
    size = packed_bytes(types, rows, columns)
    rules.require(packed.shape[-1] == size, argument, f"{size} bytes", lambda: packed.shape[-1])


def matrices(
    packed: Tensor, types: Sequence[int], rows: Sequence[int], columns: int
) -> Iterator[tuple[BlockType, Tensor]]:
    """Yield (type, bytes) for each matrix of a packed weight. The bytes are a view uint8 [rows, bytes of a row]."""
    begin = 0
    for number, count in zip(types, rows, strict=True):
        kind = TYPES[number]
        end = begin + count * kind.row_bytes(columns)
        yield kind, packed[begin:end].view(count, kind.row_bytes(columns))
        begin = end


def values(kind: BlockType, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a matrix: a new tensor [rows, columns] of ``dtype``, rounded from float32.

    blocks: uint8 [rows, bytes of a row], any strides. Some rows are read at a time.
    """
    rows, columns = blocks.shape[0], blocks.shape[1] // kind.nbytes * kind.numbers
    out = torch.empty(rows, columns, dtype=dtype, device=blocks.device)
    step = max(_AT_A_TIME // max(columns, 1), 1)
    for some, place in zip(torch.split(blocks, step), torch.split(out, step), strict=True):
        if some.numel():
            place.copy_(kind.values(some.reshape(-1, kind.nbytes)).view(place.shape))
    return out


def unpack(
    packed: Tensor, types: Sequence[int], rows: Sequence[int], columns: int, dtype: torch.dtype
) -> Tensor:
    """Return all matrices of a packed weight, one below the other: a new tensor [sum of rows, columns] of ``dtype``."""
    parts = [values(kind, blocks, dtype) for kind, blocks in matrices(packed, types, rows, columns)]
    return torch.cat(parts) if parts else torch.empty(0, columns, dtype=dtype, device=packed.device)
