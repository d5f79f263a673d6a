"""Linear layers with 8-bit weights and activations. Scales are dynamic for each token, or fixed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.checks import FLOATS, Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.quantised import eight_bit

_ROUNDING = "an exact sum, or one in float32, is scaled in float32 and rounded once, or twice with a bias"
TOLERANCES = {
    torch.float32: Tolerance(2e-5, 2e-5, "float8 products are summed in float32, in any order"),
    torch.float16: Tolerance(2e-3, 2e-3, _ROUNDING),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def linear_w8a8(
    a: Tensor,
    b: Tensor,
    rms_scale: Tensor,
    linear_scale: Tensor,
    out_dtype: torch.dtype,
    quant_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """Compute (a @ b.T) * rms_scale * linear_scale + bias, for 8-bit a and b.

    a: [..., in_features], quant_dtype, any strides: activations from ``dynamic_quant`` or ``rms_norm_w8a8``.
    b: [out_features, in_features], quant_dtype: the weight.
    rms_scale: [..., 1], float32: the scale of each token.
    linear_scale: [out_features, 1] or [out_features], float32: the scale of each row of the weight.
    out_dtype: float32, float16 or bfloat16. quant_dtype: torch.int8 or torch.float8_e4m3fn, of a and b.
    bias: [out_features] of out_dtype, or None.

    Returns a new tensor [..., out_features] of out_dtype. Nothing is mutated. int8 is summed exactly, for at most
    131071 in_features. The sum, as float32, is multiplied by the token's scale, then by the row's, and rounded;
    then the bias is added, as in LMDeploy (``pytorch/kernels/cuda/w8a8_triton_kernels.py``). Raises OpArgumentError.
    """
    scaled = eight_bit.product(a, b).to(rms_scale.dtype) * rms_scale * linear_scale.flatten()
    out = scaled.to(out_dtype)
    return out if bias is None else out + bias


_MOST_SUMMED = 131071  # the most products -128 * -128 whose sum an int32 holds


linear_w8a8.takes(
    a="quant_dtype [..., in_features]",
    b="quant_dtype on a [out_features, in_features]",
    rms_scale="float32 on a [..., 1]",
    linear_scale="like rms_scale [...]",
    bias="out_dtype on a [out_features]",
    returns="out_dtype on a [..., out_features]",
)


@linear_w8a8.check
def _check_linear_w8a8(
    rules: Rules,
    a: Tensor,
    b: Tensor,
    rms_scale: Tensor,
    linear_scale: Tensor,
    out_dtype: torch.dtype,
    quant_dtype: torch.dtype,
) -> None:
    eight_bit.check_quant_dtype(rules, "quant_dtype", quant_dtype)
    check_summed(rules, "b", b)
    rules.rank("rms_scale", rms_scale, a.dim())
    for dim in range(a.dim() - 1):
        rules.size("rms_scale", rms_scale, dim, a.shape[dim], "the tokens of a")
    check_row_scale(rules, "linear_scale", linear_scale, b)
    check_out_dtype(rules, out_dtype)


def check_summed(rules: Rules, argument: str, weight: Tensor) -> None:
    """Raise OpArgumentError if the in_features of a weight are too many to sum the products exactly."""
    expected = f"at most {_MOST_SUMMED} in_features"
    rules.require(weight.shape[1] <= _MOST_SUMMED, argument, expected, lambda: weight.shape[1])


def check_row_scale(rules: Rules, argument: str, scale: Tensor, weight: Tensor) -> None:
    """Raise OpArgumentError unless ``scale`` has one scale for each row of the weight: [rows, 1] or [rows]."""
    rules.rank(argument, scale, 1, 2)
    rules.size(argument, scale, 0, weight.shape[0], "the rows of the weight")
    if scale.dim() == 2:
        rules.size(argument, scale, 1, 1, "one scale for each row")


def check_out_dtype(rules: Rules, out_dtype: torch.dtype) -> None:
    """Raise OpArgumentError unless ``out_dtype`` is float32, float16 or bfloat16."""
    if out_dtype not in FLOATS and out_dtype is not torch.float64:
        raise rules.error("out_dtype", "torch.float32, torch.float16 or torch.bfloat16", out_dtype)


def quantised_weight(make: SampleMaker, dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    """Return a sample 8-bit weight [..., out, in] and the scale of each row: float32 [..., out, 1]."""
    values = torch.randn(shape, generator=make.generator) * shape[-1] ** -0.5
    numbers, scale = eight_bit.per_token(values, dtype)
    return numbers.to(make.device), scale.to(make.device)


@linear_w8a8.samples
def _linear_w8a8_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(dtype: torch.dtype, x: Tensor, out_features: int, bias: bool = False) -> tuple[Any, ...]:
        numbers, scale = eight_bit.per_token(x, dtype)
        weight, weight_scale = quantised_weight(make, dtype, out_features, x.shape[-1])
        added = make.tensor(out_features) if bias else None
        return numbers, weight, scale, weight_scale, make.dtype, dtype, added

    for dtype in eight_bit.LARGEST:
        named = str(dtype).removeprefix("torch.")
        yield Sample(f"one token, bias, {named}", case(dtype, make.tensor(1, 1, 64), 48, bias=True))
        yield Sample(f"many tokens, {named}", case(dtype, make.tensor(1, 33, 64), 96))
        yield Sample(f"hundreds of tokens, bias, {named}", case(dtype, make.tensor(130, 96), 40, bias=True))
        yield Sample(f"no tokens, {named}", case(dtype, make.tensor(1, 0, 32), 16, bias=True))
        yield Sample(f"odd sizes, {named}", case(dtype, make.tensor(5, 37), 19))
        numbers, weight, scale, weight_scale, *rest = case(dtype, make.tensor(5, 64), 24)
        strided = torch.cat([numbers, numbers], -1)[:, :64]
        transposed = weight.t().contiguous().t()
        yield Sample(
            f"strided a, weight stored as [in, out], {named}",
            (strided, transposed, scale, weight_scale.flatten(), *rest),
        )
    lowest = torch.full((3, 200), -128, dtype=torch.int8, device=make.device)
    ones = torch.ones(3, 1, device=make.device)
    yield Sample("the lowest numbers", (lowest, lowest, ones, ones * 1e-4, make.dtype, torch.int8, None))


@fused_op(tolerances=TOLERANCES)
def linear_w8a8_static(
    x: Tensor,
    weight: Tensor,
    input_scale: Tensor,
    input_offset: Tensor,
    deq_scale: Tensor,
    out_dtype: torch.dtype,
    quant_dtype: torch.dtype,
    quant_bias: Tensor | None,
) -> Tensor:
    """Compute (q @ weight.T + quant_bias) * deq_scale, where q = x / input_scale + input_offset in int8.

    This is the layer of ModelSlim's static W8A8 checkpoints. Their quant_bias holds the bias and undoes the offset.

    x: [..., in_features], float32, float16 or bfloat16, any strides.
    weight: [out_features, in_features], int8.
    input_scale: [1], any floating dtype. input_offset: [1], int8.
    deq_scale: [out_features], float32: input_scale times the scale of each row of the weight.
    out_dtype: float32, float16 or bfloat16. quant_dtype: torch.int8.
    quant_bias: [out_features], int32, or None.

    Returns a new tensor [..., out_features] of out_dtype. Nothing is mutated. q is rounded to the nearest integer,
    halves to even, and clamped to -128..127; sums are exact. Raises OpArgumentError.
    """
    shifted = x.to(torch.float32) / input_scale.to(torch.float32) + input_offset.to(torch.float32)
    total = eight_bit.product(shifted.round().clamp(-128, 127), weight)
    if quant_bias is not None:
        total = total + quant_bias
    return (total.to(deq_scale.dtype) * deq_scale).to(out_dtype)


linear_w8a8_static.takes(
    x="float [..., in_features]",
    weight="int8 on x [out_features, in_features]",
    input_scale="float on x [1]",
    input_offset="int8 on x [1]",
    deq_scale="float32 on x [...]",
    quant_bias="int32 on x [out_features]",
    returns="out_dtype on x [..., out_features]",
)


@linear_w8a8_static.check
def _check_linear_w8a8_static(
    rules: Rules, weight: Tensor, deq_scale: Tensor, out_dtype: torch.dtype, quant_dtype: torch.dtype
) -> None:
    if quant_dtype is not torch.int8:
        raise rules.error("quant_dtype", "torch.int8", quant_dtype)
    check_summed(rules, "weight", weight)
    check_row_scale(rules, "deq_scale", deq_scale, weight)
    check_out_dtype(rules, out_dtype)


@linear_w8a8_static.samples
def _linear_w8a8_static_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(x: Tensor, out_features: int, offset: int, bias: bool) -> tuple[Any, ...]:
        weight, scale = quantised_weight(make, torch.int8, out_features, x.shape[-1])
        by = torch.full((1,), 1 / 32, dtype=make.dtype, device=make.device)
        shift = torch.full((1,), offset, dtype=torch.int8, device=make.device)
        added = make.integers(-500, 500, out_features, dtype=torch.int32) if bias else None
        return x, weight, by, shift, scale.flatten() / 32, make.dtype, torch.int8, added

    yield Sample("one token, bias", case(make.tensor(1, 1, 64), 48, 3, bias=True))
    yield Sample("many tokens", case(make.tensor(1, 33, 64), 24, 0, bias=False))
    yield Sample("no tokens", case(make.tensor(0, 32), 16, -7, bias=True))
    yield Sample("odd sizes, strided, cut off", case(make.tensor(5, 96, scale=4)[:, :37], 19, 100, bias=True))
