"""Embedding: rows of a bfloat16 matrix, packed in 12 bits a number without loss."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.quantised import bf12


@fused_op(tolerances=Tolerance(0.0, 0.0, "numbers are copied"))
def embedding_bf12(indices: Tensor, weight: Tensor, rows: int, columns: int) -> Tensor:
    """Return the rows w[indices] of a packed matrix w [rows, columns], bit by bit as before packing.

    indices: [...], int32 or int64, any strides, each in 0..rows - 1.
    weight: [bytes], uint8, contiguous: w, as ``ops.quantised.bf12.pack`` packs it.
    rows, columns: the sizes of w, which the packed bytes do not store.

    Returns a new tensor [..., columns], bfloat16. Nothing is mutated. Raises OpArgumentError, also for an index
    out of range.
    """
    check_indices(indices, rows)
    return bf12.rows_of(weight, indices, rows, columns)


def check_indices(indices: Tensor, rows: int) -> None:
    """Raise OpArgumentError unless every index is in 0..rows - 1.

    The check reads the indices' values, so only kernels call it; fake tensors have no values.
    """
    if indices.numel():
        for index in (int(indices.min()), int(indices.max())):
            embedding_bf12.rules.require(
                0 <= index < rows, "indices", lambda: f"numbers in 0..{rows - 1}", lambda index=index: index
            )


embedding_bf12.takes(
    indices="int [...]",
    weight="any on indices [bytes]",
    returns="bfloat16 on indices [*indices, columns]",
)


@embedding_bf12.check
def _check_embedding_bf12(rules: Rules, weight: Tensor, rows: int, columns: int) -> None:
    rules.require(rows >= 0, "rows", "0 or more", lambda: rows)
    rules.require(columns >= 0, "columns", "0 or more", lambda: columns)
    bf12.check_packed(rules, "weight", weight, rows, columns)


@embedding_bf12.samples
def _embedding_bf12_samples(make: SampleMaker) -> Iterator[Sample]:
    def packed(rows: int, columns: int) -> Tensor:
        return bf12.pack(make.tensor(rows, columns).bfloat16())

    yield Sample("one token", (make.integers(0, 64, 1), packed(64, 128), 64, 128))
    yield Sample(
        "many tokens, int32", (make.integers(0, 96, 1, 33, dtype=torch.int32), packed(96, 256), 96, 256)
    )
    yield Sample("no tokens", (make.integers(0, 16, 1, 0), packed(16, 128), 16, 128))
    yield Sample("no whole strips and groups", (make.permutation(7), packed(7, 130), 7, 130))
    yield Sample("one group that is shorter, an index alone", (make.integers(0, 5), packed(5, 37), 5, 37))
    weight = make.tensor(37, 300).bfloat16()
    weight[::3, ::7] *= 1e-30
    weight[2::6, 1::13] *= 1e30
    weight[1::5, 3::11] = -0.0
    weight[5, ::17] = torch.inf
    weight[6, 4::19] = -torch.inf
    weight[7] *= 1e-38
    yield Sample("exceptions", (make.permutation(37), bf12.pack(weight), 37, 300))
    yield Sample("rows again, strided", (make.integers(0, 9, 6, 5).t()[:, ::2], packed(9, 260), 9, 260))
