"""Matrix product with a weight in GGUF's blocks."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.linear import dense
from dlinfer.ops.quantised import gguf
from dlinfer.ops.quantised.gguf_samples import packed

_ROUNDING = "numbers of the weight are rounded, products are summed in float32, and the sum is rounded"
TOLERANCES = dense.TOLERANCES | {
    torch.float16: Tolerance(2e-3, 2e-3, _ROUNDING),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def linear_gguf(
    x: Tensor, weight: Tensor, bias: Tensor | None, types: Sequence[int], rows: Sequence[int]
) -> Tensor:
    """The torch op behind ``dlinfer.ops.linear_gguf``."""
    return functional.linear(x, gguf.unpack(weight, types, rows, x.shape[-1], x.dtype), bias)


@linear_gguf.python_call
def _call_linear_gguf(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    types: Sequence[int],
    rows: Sequence[int],
    all_reduce: bool = False,
    group: Any = "",
) -> Tensor:
    """Compute x @ w.T + bias for a weight w of one or more matrices in GGUF's blocks, one below the other.

    x: [..., in_features], float32, float16 or bfloat16, any strides. in_features must be a multiple of the block size
        (32 or 256) of every type in ``types``.
    weight: [bytes], uint8, contiguous: the matrices' blocks, as a GGUF file has them (``ops.quantised.gguf``). Their
        float32 numbers are rounded to x's dtype and multiplied in it.
    bias: [sum of rows] or None, x's dtype.
    types: GGUF's number of each matrix's type, among ``ops.quantised.gguf.TYPES``.
    rows: each matrix's number of rows.
    all_reduce: sum the result over ``group``, a torch.distributed.ProcessGroup; "" or None is the default group.

    Returns a new tensor [..., sum of rows] of x's dtype. Nothing is mutated. Raises OpArgumentError.
    """
    return dense.reduced(linear_gguf.overload(x, weight, bias, types, rows), all_reduce, group)


linear_gguf.takes(x="float [..., in_features]", weight="any on x [bytes]", bias="like x [out_features]")


@linear_gguf.check
def _check_linear_gguf(
    rules: Rules, x: Tensor, weight: Tensor, bias: Tensor | None, types: Sequence[int], rows: Sequence[int]
) -> None:
    rules.rank("weight", weight, 1)
    gguf.check_packed(rules, "weight", weight, types, rows, x.shape[-1])
    if bias is not None:
        rules.size("bias", bias, 0, sum(rows), "the rows of all matrices")


@linear_gguf.fake
def _fake_linear_gguf(x: Tensor, rows: Sequence[int]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(rows)))


@linear_gguf.samples
def _linear_gguf_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(count: int, columns: int, types: list[int], rows: list[int], has_bias: bool) -> tuple[Any, ...]:
        bias = make.tensor(sum(rows)) if has_bias else None
        return make.tensor(count, columns), packed(make, types, rows, columns), bias, types, rows

    for number, kind in gguf.TYPES.items():
        columns = 512 if kind.numbers == 256 else 96
        yield Sample(f"one token, {kind.name}", case(1, columns, [number], [11], False))
        yield Sample(f"some tokens, {kind.name}, bias", case(5, columns, [number], [24], True))
    yield Sample("many tokens, three types", case(40, 256, [12, 13, 14], [32, 16, 7], True))
    yield Sample("no tokens", case(0, 32, [8], [16], True))
    yield Sample("no rows", case(3, 32, [8], [0], False))
    yield Sample("nothing to sum", case(2, 0, [2], [5], True))
    yield Sample("sizes of no block", case(3, 37, [1, 0], [5, 2], False))
    _, *rest = case(64, 7, [30], [9], False)
    yield Sample(
        "strided", (make.tensor(96, 6).t(), packed(make, [2], [24], 96), make.tensor(24, 2)[:, 0], [2], [24])
    )
    yield Sample("rows of a wider tensor", (make.tensor(4, 21)[:, 7:14], *rest))
