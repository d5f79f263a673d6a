"""A grouped product in Triton: it multiplies rows, sorted by expert, by the weights of their experts."""

from dataclasses import dataclass
from typing import Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK = 16
"""The number of choices in a block. The smallest number that a matrix unit takes needs the least padding."""
_COLUMNS, _INNER = 64, 64


@dataclass(frozen=True)
class Choices:
    """The choices of all tokens, sorted by expert, as moe_align_block_size returns them.

    A choice is a pair of a token and one of its experts. The choices of a token have consecutive ids.
    order: int32, the ids of the choices, in blocks of one expert each. An id of ``count`` or above is padding.
    owners: int32, the expert of each block.
    padded: int32 [1], how many entries of ``order`` are in use.
    count: the number of choices.
    """

    order: Tensor
    owners: Tensor
    padded: Tensor
    count: int


def grouped_product(
    rows: Tensor, weights: Tensor, choices: Choices, per_row: int = 1, row_weights: Tensor | None = None
) -> Tensor:
    """Multiply each choice's row by the weight of the choice's expert and, if given, by the choice's ``row_weights``.

    rows: contiguous [choices / per_row, in]; choice c has row c // per_row. weights: [experts, out, in], any strides.
    row_weights: float32 [choices], or None. Returns [choices, out], summed in float32 and rounded once.
    """
    columns, inner = weights.shape[1:]
    out = rows.new_empty(choices.count, columns)
    grid = len(choices.owners), triton.cdiv(columns, _COLUMNS)
    launch: Any = _grouped_product
    launch[grid](
        *(rows, weights, out, choices.padded if row_weights is None else row_weights),
        *(choices.order, choices.owners, choices.padded, choices.count),
        *(columns, inner, rows.stride(0), *weights.stride()),
        PER_ROW=per_row,
        WEIGHTED=row_weights is not None,
        BLOCK=BLOCK,
        COLUMNS=_COLUMNS,
        INNER=_INNER,
    )
    return out


@triton.jit
def _grouped_product(
    rows,
    weights,
    out,
    row_weights,
    order,
    owners,
    padded,
    count,
    columns,
    inner,
    row_stride,
    expert_stride,
    column_stride,
    inner_stride,
    PER_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    block = tl.program_id(0)
    if block * BLOCK >= tl.load(padded):
        return
    choice = tl.load(order + block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    real = choice < count
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < columns
    step = tl.arange(0, INNER)
    weight = weights + tl.load(owners + block).to(tl.int64) * expert_stride
    x_at = rows + (choice // PER_ROW)[:, None] * row_stride + step[None, :]
    w_at = weight + column[None, :].to(tl.int64) * column_stride + step[:, None] * inner_stride
    total = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    for start in range(0, inner, INNER):
        within = start + step < inner
        x = tl.load(x_at + start, mask=real[:, None] & within[None, :], other=0.0)
        w = tl.load(w_at + start * inner_stride, mask=within[:, None] & known[None, :], other=0.0)
        total += tl.dot(x, w)
    if WEIGHTED:
        total *= tl.load(row_weights + choice, mask=real, other=0.0)[:, None]
    place = out + choice[:, None] * columns + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=real[:, None] & known[None, :])
