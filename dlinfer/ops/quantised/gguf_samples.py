"""Random weights in GGUF's blocks, for samples of ops: any bytes are a block, if its scales are of a fitting size."""

import torch
from torch import Tensor

from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.quantised.gguf import TYPES

_FACTORS: dict[int, tuple[tuple[int, float], ...]] = {
    2: ((0, 1 / 8),),
    3: ((0, 1 / 8), (2, -1.0)),
    6: ((0, 1 / 16),),
    7: ((0, 1 / 16), (2, -1.0)),
    8: ((0, 1 / 128),),
    12: ((0, 1 / 256), (2, 1 / 32)),
    13: ((0, 1 / 512), (2, 1 / 32)),
    14: ((208, 1 / 2048),),
}
"""Type -> (place, factor) of each float16 in its blocks. With these factors the numbers of a block are about 1."""


def packed(make: SampleMaker, types: list[int], rows: list[int], columns: int) -> Tensor:
    """Return a random packed weight, uint8 [bytes], whose products with rows of size 1 are about 1."""
    parts = [_matrix(make, number, count, columns) for number, count in zip(types, rows, strict=True)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _matrix(make: SampleMaker, number: int, rows: int, columns: int) -> Tensor:
    kind, scale = TYPES[number], max(columns, 1) ** -0.5
    if number not in _FACTORS:
        dtype = {4: torch.float32, 2: torch.float16 if number == 1 else torch.bfloat16}[kind.nbytes]
        return make.tensor(rows, columns, scale=scale).to(dtype).view(torch.uint8).flatten()
    blocks = make.integers(0, 256, rows * columns // kind.numbers, kind.nbytes).to(torch.uint8)
    for place, factor in _FACTORS[number]:
        factors = (make.tensor(blocks.shape[0]).abs() + 0.5) * scale * factor
        blocks[:, place : place + 2] = factors.to(torch.float16)[:, None].view(torch.uint8)
    return blocks.flatten()
