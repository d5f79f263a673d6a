"""Dynamic quantisation of activations: 8-bit numbers with a scale for each token."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.quantised import eight_bit

_TOLERANCE = Tolerance(1e-6, 1e-12, "float32 arithmetic of exactly converted values; a division rounds once")


@fused_op(tolerances=_TOLERANCE)
def dynamic_quant(x: Tensor, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The torch op behind ``dlinfer.ops.dynamic_quant``."""
    return eight_bit.per_token(x, quant_dtype)


@dynamic_quant.python_call
def _call_dynamic_quant(
    x: Tensor, quant_dtype: torch.dtype, quant_granularity: str = "PER_TOKEN"
) -> tuple[Tensor, Tensor]:
    """Quantise x to 8 bits with one scale for each token: its largest absolute value becomes 127, or 448 in float8.

    x: [..., hidden], float32, float16 or bfloat16, any strides, hidden at least 1.
    quant_dtype: torch.int8 or torch.float8_e4m3fn.
    quant_granularity: "PER_TOKEN".

    Returns a new contiguous tensor of x's shape and quant_dtype, and the scales, float32 [..., 1]. The product of both
    is x, except for rounding. Nothing is mutated. Halves are rounded away from zero in int8 and to even in float8. A
    largest value below 1e-7 counts as 1e-7. The rounding and this lower bound are as in LMDeploy
    (``pytorch/kernels/cuda/w8a8_triton_kernels.py``, ``per_token_quant_int8``). The scale of a token with a NaN is NaN.
    Raises OpArgumentError. Raises UnsupportedFeatureError for another granularity.
    """
    if quant_granularity != "PER_TOKEN":
        raise UnsupportedFeatureError(
            feature=f"quant_granularity={quant_granularity!r}",
            where="dlinfer.ops.dynamic_quant",
            advice="use 'PER_TOKEN', one scale for each token",
        )
    return dynamic_quant.overload(x, quant_dtype)


dynamic_quant.takes(
    x="float [..., hidden]",
    returns="quant_dtype on x [*x], float32 on x [..., 1]",
)


@dynamic_quant.check
def _check_dynamic_quant(rules: Rules, x: Tensor, quant_dtype: torch.dtype) -> None:
    eight_bit.check_quantised_rows(rules, x, quant_dtype)


@dynamic_quant.samples
def _dynamic_quant_samples(make: SampleMaker) -> Iterator[Sample]:
    for dtype in eight_bit.LARGEST:
        named = str(dtype).removeprefix("torch.")
        yield Sample(f"one token, {named}", (make.tensor(1, 1, 64), dtype))
        yield Sample(f"many tokens, {named}", (make.tensor(1, 33, 130), dtype))
    yield Sample("no tokens", (make.tensor(1, 0, 64), torch.int8))
    yield Sample("strided", (make.tensor(7, 96)[:, :37], torch.int8))
    yield Sample("zeros", (make.tensor(3, 32) * 0, torch.int8))
    yield Sample("one value a token", (make.tensor(5, 1), torch.float8_e4m3fn))
    steps = torch.arange(-127, 128, dtype=torch.float64) / 2
    halves = torch.cat([steps, torch.tensor([127.0, -127.0], dtype=torch.float64)]).to(make.dtype)
    yield Sample("values halfway between two steps", (halves.to(make.device)[None], torch.int8))
