"""Linear layers with float8 weights: with a scale for each block, as in DeepSeek, or with fixed scales."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.declarations import groups
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.quantised import eight_bit
from dlinfer.ops.quantised.linear_w8a8 import check_row_scale, check_summed, quantised_weight

FP8 = torch.float8_e4m3fn
_ROUNDING = "products are summed and scaled in float32; the sum is rounded once, or twice with a bias"
TOLERANCES = {
    torch.float32: Tolerance(2e-5, 2e-5, "a float32 sum over in_features of scaled products, in any order"),
    torch.float16: Tolerance(2e-3, 2e-3, _ROUNDING),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def linear_blocked_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    block_size: int,
    power_of_two_scales: bool,
) -> Tensor:
    """Compute x @ weight.T + bias, where each square block of the weight has a scale, and x is rounded to float8 too.

    x: [..., in_features], float32, float16 or bfloat16, any strides. Each block_size neighbours of a token share a
        scale, which makes the largest of them 448.
    weight: [out_features, in_features], float8_e4m3fn.
    weight_scale: [out_features / block_size, in_features / block_size], rounded up, float32: the factor of each
        block (``weight_scale_inv`` of DeepSeek's checkpoints).
    bias: [out_features], x's dtype, or None.
    block_size: rows and columns of a block; 128 in known checkpoints.
    power_of_two_scales: round x's scales up to powers of two (the format ue8m0).

    Returns a new tensor [..., out_features] of x's dtype. Nothing is mutated. x is rounded as in LMDeploy
    (``pytorch/kernels/cuda/blocked_gemm_fp8.py``, ``quant_fp8``), but the last block of a token may be smaller. Raises
    OpArgumentError.
    """
    kept = eight_bit.rounded_in_blocks(x, block_size, power_of_two_scales)
    wide = eight_bit.widened_blocks(weight, weight_scale, block_size)
    out = eight_bit.product(kept, wide).to(x.dtype)
    return out if bias is None else out + bias


linear_blocked_fp8.takes(
    x="float [..., in_features]",
    weight="float8_e4m3fn on x [out_features, in_features]",
    weight_scale="float32 on x [groups(out_features, block_size), groups(in_features, block_size)]",
    bias="like x [out_features]",
    returns="like x [..., out_features]",
)


@linear_blocked_fp8.check
def _check_linear_blocked_fp8(rules: Rules, x: Tensor, weight: Tensor, block_size: int) -> None:
    check_in_features(rules, x, weight)
    rules.require(block_size >= 1, "block_size", "at least 1", lambda: block_size)


def check_in_features(rules: Rules, x: Tensor, weight: Tensor) -> None:
    """Raise OpArgumentError unless in_features is at least 1, and small enough to sum the products exactly."""
    rules.require(x.shape[-1] >= 1, "x", "a last dimension of at least 1", lambda: tuple(x.shape))
    check_summed(rules, "weight", weight)


def blocked_weight(make: SampleMaker, block_size: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Return a sample float8 weight [..., out, in] and the scale of each of its blocks."""
    numbers = (torch.randn(shape, generator=make.generator) * 100).clamp(-448, 448).to(FP8)
    counts = [groups(size, block_size) for size in shape[-2:]]
    scale = (torch.rand(*shape[:-2], *counts, generator=make.generator) + 0.5) / 100 / shape[-1] ** 0.5
    return numbers.to(make.device), scale.to(make.device)


@linear_blocked_fp8.samples
def _linear_blocked_fp8_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(
        x: Tensor, out_features: int, block: int, bias: bool = False, power_of_two: bool = False
    ) -> tuple[Any, ...]:
        added = make.tensor(out_features) if bias else None
        weight, scale = blocked_weight(make, block, out_features, x.shape[-1])
        return x, weight, scale, added, block, power_of_two

    yield Sample("one token, bias", case(make.tensor(1, 1, 64), 48, 16, bias=True))
    yield Sample("many tokens, blocks of 128", case(make.tensor(1, 33, 256), 128, 128))
    yield Sample("hundreds of tokens, bias", case(make.tensor(130, 96), 40, 32, bias=True))
    yield Sample("no tokens", case(make.tensor(1, 0, 32), 16, 16, bias=True))
    yield Sample("sizes that blocks do not divide", case(make.tensor(5, 37), 19, 16))
    yield Sample("scales that are powers of two", case(make.tensor(5, 64), 24, 16, power_of_two=True))
    strided, weight, *rest = case(make.tensor(7, 96)[:, :64], 24, 16)
    yield Sample("strided x, weight stored as [in, out]", (strided, weight.t().contiguous().t(), *rest))
    yield Sample("zeros", case(make.tensor(3, 64) * 0, 24, 16, bias=True))


@fused_op(tolerances=TOLERANCES)
def linear_static_fp8(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute x @ weight.T + bias, where x is rounded to float8 by a fixed scale, and each weight row has a scale.

    x: [..., in_features], float32, float16 or bfloat16, any strides.
    weight: [out_features, in_features], float8_e4m3fn.
    weight_scale: [out_features] or [out_features, 1], float32: the factor of each row of the weight.
    input_scale: [1], float32: x / input_scale is rounded to float8, and cut off at -448 and 448.
    bias: [out_features], x's dtype, or None.

    Returns a new tensor [..., out_features] of x's dtype. Nothing is mutated. The arithmetic is
    LMDeploy's for static FP8 (``matmul_kernel_static_quant``). Raises OpArgumentError.
    """
    kept = eight_bit.rounded_by(x, input_scale)
    out = (eight_bit.product(kept, weight) * weight_scale.flatten()).to(x.dtype)
    return out if bias is None else out + bias


linear_static_fp8.takes(
    x="float [..., in_features]",
    weight="float8_e4m3fn on x [out_features, in_features]",
    weight_scale="float32 on x [...]",
    input_scale="float32 on x [1]",
    bias="like x [out_features]",
    returns="like x [..., out_features]",
)


@linear_static_fp8.check
def _check_linear_static_fp8(rules: Rules, x: Tensor, weight: Tensor, weight_scale: Tensor) -> None:
    check_in_features(rules, x, weight)
    check_row_scale(rules, "weight_scale", weight_scale, weight)


@linear_static_fp8.samples
def _linear_static_fp8_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(x: Tensor, out_features: int, input_scale: float, bias: bool = False) -> tuple[Any, ...]:
        weight, scale = quantised_weight(make, FP8, out_features, x.shape[-1])
        added = make.tensor(out_features) if bias else None
        return x, weight, scale.flatten(), torch.full((1,), input_scale, device=make.device), added

    yield Sample("one token, bias", case(make.tensor(1, 1, 64), 48, 0.01, bias=True))
    yield Sample("many tokens", case(make.tensor(1, 33, 64), 96, 0.02))
    yield Sample("hundreds of tokens", case(make.tensor(130, 96), 40, 0.02))
    yield Sample("no tokens", case(make.tensor(0, 32), 16, 0.02, bias=True))
    yield Sample("odd sizes, values cut off", case(make.tensor(5, 37), 19, 0.001))
    x, weight, scale, *rest = case(make.tensor(7, 96)[:, :64], 24, 0.02)
    yield Sample("strided x, scales in a column", (x, weight.t().contiguous().t(), scale[:, None], *rest))
