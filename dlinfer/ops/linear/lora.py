"""LoRA (Hu et al., 2021, arXiv:2106.09685) on top of a linear layer. Each token has its own adapter or none."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.core.checks import ints
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op

_ROUNDING = "both products, their scaling and the sum are rounded to the tensors' dtype, as PEFT does"
TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-5, "float32 sums over in_features and the rank, in any order"),
    torch.float16: Tolerance(4e-3, 4e-3, _ROUNDING),
    torch.bfloat16: Tolerance(3.2e-2, 3.2e-2, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def lora_linear(
    base: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    adapter_ids: Tensor,
) -> Tensor:
    """Compute base + scaling * (x @ A.T) @ B.T, with A, B and the scaling of each token's adapter.

    a and b hold the rows of all adapters, one adapter after another, as LMDeploy packs them. An adapter has as many
    rows as its rank.

    base: [tokens, out_features], the linear layer's result; float32, float16 or bfloat16, any strides.
    x: [tokens, in_features], the layer's input.
    a: [rows, in_features], A of each adapter.
    b: [rows, out_features], B.T of each adapter. All of base's dtype, any strides.
    starts, ranks: [adapters], int32 or int64: each adapter's first row and its number of rows. An adapter of rank 0
        changes nothing.
    scalings: [adapters], floating.
    adapter_ids: [tokens], int32 or int64: the adapter of each token, negative for none. Without an adapter the result
        is the token's row of base, bit by bit.

    Returns a new tensor of base's shape and dtype. Nothing is mutated. Products, their scaling and the sum are rounded
    to base's dtype. Raises OpArgumentError, also if a token's adapter id or its adapter's rows are out of range.
    """
    out = base.clone(memory_format=torch.contiguous_format)
    for adapter in check_adapters(a, starts, ranks, adapter_ids):
        start, rank = int(starts[adapter]), int(ranks[adapter])
        rows = (adapter_ids == adapter).nonzero()[:, 0]
        low = x[rows] @ a[start : start + rank].T
        out[rows] = base[rows] + low @ b[start : start + rank] * float(scalings[adapter])
    return out


def check_adapters(a: Tensor, starts: Tensor, ranks: Tensor, adapter_ids: Tensor) -> list[int]:
    """Return the ids of the adapters that some token has, sorted. Leave out adapters of rank 0.

    Raises OpArgumentError if an id, or the rows of such an adapter, are out of range. The check reads the values, so
    only kernels call it; fake tensors have no values.
    """
    present = sorted({adapter for adapter in ints(adapter_ids) if adapter >= 0})
    if present:
        lora_linear.rules.require(
            present[-1] < len(starts), "adapter_ids", lambda: f"ids below {len(starts)}", lambda: present[-1]
        )
    first, rows = ints(starts), ints(ranks)
    for adapter in present:
        start, rank = first[adapter], rows[adapter]
        inside = rank >= 0 and start >= 0 and start + rank <= a.shape[0]
        lora_linear.rules.require(
            inside,
            "starts",
            lambda: f"rows inside the {a.shape[0]} rows of a",
            lambda s=start, r=rank: f"{r} rows from row {s} on",
        )
    return [adapter for adapter in present if rows[adapter]]


lora_linear.takes(
    base="float [tokens, out_features]",
    x="like base [tokens, in_features]",
    a="like base [rows, in_features]",
    b="like base [rows, out_features]",
    starts="int on base [adapters]",
    ranks="int on base [adapters]",
    scalings="float on base [adapters]",
    adapter_ids="int on base [tokens]",
    returns="like base [tokens, out_features]",
)


@lora_linear.samples
def _lora_linear_samples(make: SampleMaker) -> Iterator[Sample]:
    def ids(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=make.device)

    def adapters(ranks: list[int], in_features: int, out_features: int) -> tuple[Tensor, ...]:
        rows = sum(ranks)
        starts = [sum(ranks[:index]) for index in range(len(ranks))]
        a = make.tensor(rows, in_features, scale=in_features**-0.5)
        b = make.tensor(rows, out_features, scale=max(1, rows) ** -0.5)
        scalings = torch.arange(1, len(ranks) + 1, device=a.device) / 2
        return a, b, ids(*starts), ids(*ranks), scalings

    yield Sample("one token", (make.tensor(1, 24), make.tensor(1, 32), *adapters([4], 32, 24), ids(0)))
    yield Sample(
        "adapters of different ranks, and none",
        (make.tensor(7, 24), make.tensor(7, 32), *adapters([4, 8, 1], 32, 24), ids(1, 1, -1, 0, 2, -1, 1)),
    )
    yield Sample(
        "all of one adapter, int32",
        (
            make.tensor(5, 16),
            make.tensor(5, 32),
            *adapters([8, 2], 32, 16),
            ids(0, 0, 0, 0, 0, dtype=torch.int32),
        ),
    )
    yield Sample(
        "no token has an adapter",
        (make.tensor(3, 16), make.tensor(3, 32), *adapters([8], 32, 16), ids(-1, -1, -1)),
    )
    yield Sample("no tokens", (make.tensor(0, 16), make.tensor(0, 32), *adapters([8], 32, 16), ids()))
    yield Sample("no adapters", (make.tensor(2, 16), make.tensor(2, 32), *adapters([], 32, 16), ids(-1, -1)))
    yield Sample(
        "a rank of 0", (make.tensor(2, 16), make.tensor(2, 32), *adapters([0, 2], 32, 16), ids(0, 1))
    )
    yield Sample(
        "strided",
        (
            make.tensor(6, 48)[:, ::3],
            make.tensor(32, 6).t(),
            *adapters([3, 5], 32, 16),
            ids(1, 0, -1, 1, 0, 1),
        ),
    )
