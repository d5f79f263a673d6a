"""RMS normalisation fused with quantisation of the result to 8 bits, alone and after the residual sum."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.norm.rms_norm import check_eps
from dlinfer.ops.quantised import eight_bit

_ROUNDING = "the normalised value is rounded to x's dtype, and the largest one of a token is its scale"
TOLERANCES = {
    torch.float32: Tolerance(2e-6, 2e-9, "one float32 reduction over the hidden size"),
    torch.float16: Tolerance(2e-3, 2e-6, _ROUNDING),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def rms_norm_w8a8(x: Tensor, weight: Tensor, eps: float, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension, in 8 bits, with one scale for each token.

    x: [..., hidden], float32, float16 or bfloat16, any strides, hidden at least 1. weight: [hidden], dtype of x.
    eps: > 0. quant_dtype: torch.int8 or torch.float8_e4m3fn.

    Returns a new contiguous tensor of x's shape and quant_dtype, and the scales, float32 [..., 1]. Nothing is mutated.
    The norm is taken in float32 and rounded to x's dtype once, after the weight, as in LMDeploy
    (``pytorch/kernels/cuda/w8a8_triton_kernels.py``, ``rms_norm_dynamic_quant``). The result is quantised as
    by ``dynamic_quant``, except that a token of zeros gets the scale 0. Raises OpArgumentError.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return eight_bit.per_token((weight.to(wide.dtype) * (wide * scale)).to(x.dtype), quant_dtype, least=0.0)


rms_norm_w8a8.takes(
    x="float [..., hidden]",
    weight="like x [hidden]",
    returns="quant_dtype on x [*x], float32 on x [..., 1]",
)


_SHAPES = {"one token": (1, 1, 64), "many tokens": (1, 33, 128), "no tokens": (1, 0, 64), "2-d": (5, 37)}


@rms_norm_w8a8.samples
def _rms_norm_w8a8_samples(make: SampleMaker) -> Iterator[Sample]:
    for dtype in eight_bit.LARGEST:
        for name, shape in _SHAPES.items():
            named = f"{name}, {str(dtype).removeprefix('torch.')}"
            yield Sample(named, (make.tensor(*shape), make.tensor(shape[-1]), 1e-6, dtype))
    yield Sample("strided", (make.tensor(1, 7, 96)[..., :32], make.tensor(32), 1e-5, torch.int8))
    yield Sample("zeros", (make.tensor(2, 32) * 0, make.tensor(32), 1e-5, torch.int8))


@fused_op(tolerances=TOLERANCES)
def add_rms_norm_w8a8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quant_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the rms_norm_w8a8 of x + residual, and return also x + residual, the new residual.

    x, residual: [..., hidden], same shape and dtype, any strides. weight: [hidden], same dtype. eps: > 0.
    quant_dtype: torch.int8 or torch.float8_e4m3fn.

    Returns (numbers, scales, sum): the two results of rms_norm_w8a8, and x + residual, a new contiguous tensor of x's
    dtype. Nothing is mutated. The sum is rounded to x's dtype before it is normalised. Raises OpArgumentError.
    """
    total = (x + residual).contiguous()
    return *rms_norm_w8a8.reference(total, weight, eps, quant_dtype), total


add_rms_norm_w8a8.takes(
    x="float [..., hidden]",
    residual="like x [*x]",
    weight="like x [hidden]",
    returns="quant_dtype on x [*x], float32 on x [..., 1], like x [*x]",
)


@rms_norm_w8a8.check
@add_rms_norm_w8a8.check
def _check(rules: Rules, x: Tensor, eps: float, quant_dtype: torch.dtype) -> None:
    check_eps(rules, eps)
    eight_bit.check_quantised_rows(rules, x, quant_dtype)


@add_rms_norm_w8a8.samples
def _add_rms_norm_w8a8_samples(make: SampleMaker) -> Iterator[Sample]:
    for dtype in eight_bit.LARGEST:
        for name, shape in _SHAPES.items():
            named = f"{name}, {str(dtype).removeprefix('torch.')}"
            tensors = make.tensor(*shape), make.tensor(*shape), make.tensor(shape[-1])
            yield Sample(named, (*tensors, 1e-6, dtype))
    wide = make.tensor(1, 7, 96)
    views = wide[..., :32], wide[..., 32:64]
    yield Sample("strided views of one tensor", (*views, make.tensor(32), 1e-5, torch.int8))
