"""Matrix product with a weight of 4 bits, as AWQ checkpoints store it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.linear.dense import reduced
from dlinfer.ops.quantised.packing import AWQ

_ROUNDING = "the weight is not rounded; products are summed in float32 and the sum is rounded once"
TOLERANCES = {
    torch.float32: Tolerance(
        1e-5,
        1e-5,
        "float32 sums over in_features in any order, with zero points subtracted from x or from sums",
    ),
    torch.float16: Tolerance(1e-3, 1e-3, _ROUNDING),
    torch.bfloat16: Tolerance(8e-3, 8e-3, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def weight_quant_matmul(
    x: Tensor, qweight: Tensor, scales: Tensor, offset: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    """The torch op behind ``dlinfer.ops.weight_quant_matmul``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.to(wide) @ AWQ.of_groups(group_size).dequantise(qweight, scales, offset, wide)
    return (out if bias is None else out + bias).to(x.dtype)


@weight_quant_matmul.python_call
def _call_weight_quant_matmul(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    *,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    all_reduce: bool = False,
    group_size: int = 0,
    group: Any = "",
) -> Tensor:
    """Compute x @ w + bias, with w[i, o] = (q[i, o] - zero[g, o]) * scales[g, o] for the group g = i // group_size.

    x: [..., in_features], float32, float16 or bfloat16, any strides.
    qweight: [in_features, out_features / 8], int32: q, eight 4-bit numbers in a word, in the layout
        ``ops.quantised.packing.AWQ``.
    scales: [groups, out_features], any of the floating dtypes.
    offset: [groups, out_features / 8], int32: the zero points (qzeros of checkpoints), packed likewise. None means 8.
    bias: [out_features] or None, any of the floating dtypes.
    group_size: in_features that share a scale and a zero point; the last group may be shorter. 0 means all in_features.
    all_reduce: sum the result over ``group``, a torch.distributed.ProcessGroup; "" or None is the default group.

    Returns a new tensor [..., out_features] of x's dtype, summed in float32 at least. For a row of x with an infinity,
    no result is finite; a result may be NaN even if the exact sum is infinite. Nothing is mutated. Raises
    OpArgumentError.
    """
    out = weight_quant_matmul.overload(x, qweight, scales, offset, bias, group_size)
    return reduced(out, all_reduce, group)


weight_quant_matmul.takes(
    x="float [..., in_features]",
    qweight="int32 on x [in_features, words]",
    scales="float on x [groups(in_features, group_size), 8 * words]",
    offset="int32 on x [groups(in_features, group_size), words]",
    bias="float on x [8 * words]",
    returns="like x [..., 8 * words]",
)


@weight_quant_matmul.check
def check_group_size(rules: Rules, group_size: int) -> None:
    """Raise OpArgumentError if ``group_size`` is negative."""
    rules.require(group_size >= 0, "group_size", "0 or more", lambda: group_size)


@weight_quant_matmul.samples
def _weight_quant_matmul_samples(make: SampleMaker) -> Iterator[Sample]:
    def words(*shape: int) -> Tensor:
        return make.integers(-(2**31), 2**31, *shape).to(AWQ.storage)

    def parts(
        in_features: int, out_features: int, group_size: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = AWQ.of_groups(group_size).groups(in_features)
        scales = (make.tensor(groups, out_features).abs() + 0.5) * 0.1 * max(in_features, 1) ** -0.5
        return words(in_features, out_features // 8), scales.to(dtype), words(groups, out_features // 8)

    half = torch.float16
    yield Sample("one token", (make.tensor(1, 64), *parts(64, 48, 32, half), None, 32))
    yield Sample(
        "many tokens, bias",
        (make.tensor(1, 33, 128), *parts(128, 296, 64, half), make.tensor(296).half(), 64),
    )
    yield Sample("no tokens", (make.tensor(0, 32), *parts(32, 16, 32, half), None, 32))
    weight, scales, _ = parts(96, 136, 32, half)
    yield Sample("no zero points", (make.tensor(5, 96), weight, scales, None, None, 32))
    yield Sample("a last group that is shorter", (make.tensor(3, 37), *parts(37, 24, 16, half), None, 16))
    yield Sample(
        "one group, scales of x's dtype", (make.tensor(7, 40), *parts(40, 8, 0, make.dtype), None, 0)
    )
    yield Sample("nothing to sum", (make.tensor(2, 0), *parts(0, 8, 32, half), make.tensor(8), 32))
    weight, scales, zeros = parts(64, 80, 32, half)
    yield Sample(
        "strided",
        (
            make.tensor(64, 6).t(),
            weight.t().contiguous().t(),
            scales.t().contiguous().t(),
            torch.stack((zeros, zeros), -1)[..., 0],
            make.tensor(80, 2)[:, 0],
            32,
        ),
    )
