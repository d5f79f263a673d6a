"""Embedding: rows of a matrix in GGUF's blocks."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.core.checks import FLOATS, Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.quantised import gguf
from dlinfer.ops.quantised.gguf_samples import packed


@fused_op(tolerances=Tolerance(0.0, 0.0, "numbers are unpacked in float32 and rounded once"))
def embedding_gguf(
    indices: Tensor, weight: Tensor, type: int, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """Return the rows w[indices] of a matrix w [rows, columns] in GGUF's blocks.

    indices: [...], int32 or int64, any strides, each in 0..rows - 1.
    weight: [bytes], uint8, contiguous: w, as a GGUF file has it (``ops.quantised.gguf``).
    type: GGUF's number of w's type, among ``ops.quantised.gguf.TYPES``.
    rows, columns: the sizes of w.
    dtype: the result's dtype: float32, float16 or bfloat16.

    Returns a new tensor [..., columns] of ``dtype``. Nothing is mutated. Raises OpArgumentError, also for an index out
    of range.
    """
    check_indices(indices, rows)
    kind = gguf.TYPES[type]
    blocks = weight.view(rows, kind.row_bytes(columns))[indices.flatten().long()]
    return gguf.values(kind, blocks, dtype).view(*indices.shape, columns)


def check_indices(indices: Tensor, rows: int) -> None:
    """Raise OpArgumentError unless every index is in 0..rows - 1.

    The check reads the indices' values, so only kernels call it; fake tensors have no values.
    """
    if indices.numel():
        for index in (int(indices.min()), int(indices.max())):
            embedding_gguf.rules.require(
                0 <= index < rows, "indices", lambda: f"numbers in 0..{rows - 1}", lambda index=index: index
            )


embedding_gguf.takes(indices="int [...]", weight="any on indices [bytes]")


@embedding_gguf.check
def _check_embedding_gguf(
    rules: Rules, weight: Tensor, type: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    rules.require(dtype in FLOATS, "dtype", "float32, float16 or bfloat16", lambda: dtype)
    rules.rank("weight", weight, 1)
    gguf.check_packed(rules, "weight", weight, [type], [rows], columns)


@embedding_gguf.fake
def _fake_embedding_gguf(indices: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return indices.new_empty((*indices.shape, columns), dtype=dtype)


@embedding_gguf.samples
def _embedding_gguf_samples(make: SampleMaker) -> Iterator[Sample]:
    for number, kind in gguf.TYPES.items():
        columns, weight = 512, packed(make, [number], [24], 512)
        yield Sample(
            f"many tokens, {kind.name}", (make.integers(0, 24, 1, 9), weight, number, 24, columns, make.dtype)
        )
    weight = packed(make, [12], [7], 256)
    yield Sample(
        "one token, int32", (make.integers(0, 7, 1, dtype=torch.int32), weight, 12, 7, 256, make.dtype)
    )
    yield Sample("no tokens", (make.integers(0, 7, 1, 0), weight, 12, 7, 256, make.dtype))
    yield Sample("an index alone", (make.integers(0, 7), weight, 12, 7, 256, make.dtype))
    again = make.integers(0, 9, 6, 5).t()[:, ::2]
    yield Sample("rows again, strided", (again, packed(make, [8], [9], 96), 8, 9, 96, make.dtype))
