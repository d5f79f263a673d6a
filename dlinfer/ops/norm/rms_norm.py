"""RMS normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467), alone and fused with the residual sum."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op

_ROUNDING = (
    "the statistic is computed in float32 and the result is rounded twice: before and after the weight"
)
TOLERANCES = {
    torch.float32: Tolerance(2e-6, 2e-6, "one float32 reduction over the hidden size"),
    torch.float16: Tolerance(2e-3, 2e-3, _ROUNDING),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., hidden], float32, float16 or bfloat16, any strides. weight: [hidden], dtype of x. eps: > 0.

    Returns a new tensor of x's shape and dtype. Nothing is mutated. The mean is taken in float32. The normalised value
    is rounded to x's dtype before the product with the weight, as in HF transformers' LlamaRMSNorm. Raises
    OpArgumentError.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(x.dtype)).contiguous()


rms_norm.takes(
    x="float [..., hidden]",
    weight="like x [hidden]",
    returns="like x [*x]",
)


@rms_norm.samples
def _rms_norm_samples(make: SampleMaker) -> Iterator[Sample]:
    for name, shape in _SHAPES.items():
        yield Sample(name, (make.tensor(*shape), make.tensor(shape[-1]), 1e-6))
    yield Sample("lies otherwise", (make.tensor(5, 3, 32).transpose(0, 1), make.tensor(32), 1e-6))
    yield Sample("strided", (make.tensor(1, 7, 96)[..., :32], make.tensor(32), 1e-5))
    yield Sample("large values", (make.tensor(1, 3, 64, scale=1e3), make.tensor(64), 1e-6))


@fused_op(tolerances=TOLERANCES)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the rms_norm of x + residual, and return also x + residual, the new residual.

    x, residual: [..., hidden], same shape and dtype, any strides. weight: [hidden], same dtype. eps: > 0.

    Returns (normalised, sum), two new tensors of x's shape and dtype. Nothing is mutated. The sum is rounded to x's
    dtype before it is normalised, as two separate operations would. Raises OpArgumentError.
    """
    total = (x + residual).contiguous()
    return rms_norm.reference(total, weight, eps), total


add_rms_norm.takes(
    x="float [..., hidden]",
    residual="like x [*x]",
    weight="like x [hidden]",
    returns="like x [*x], like x [*x]",
)


@rms_norm.check
@add_rms_norm.check
def check_eps(rules: Rules, eps: float) -> None:
    """Raise OpArgumentError unless ``eps`` is positive."""
    rules.require(eps > 0, "eps", "a positive number", lambda: eps)


@add_rms_norm.samples
def _add_rms_norm_samples(make: SampleMaker) -> Iterator[Sample]:
    for name, shape in _SHAPES.items():
        yield Sample(name, (make.tensor(*shape), make.tensor(*shape), make.tensor(shape[-1]), 1e-6))
    wide = make.tensor(1, 7, 96)
    yield Sample("strided views of one tensor", (wide[..., :32], wide[..., 32:64], make.tensor(32), 1e-5))


_SHAPES = {
    "one token": (1, 1, 64),
    "many tokens": (1, 33, 128),
    "no tokens": (1, 0, 64),
    "2-d": (5, 48),
    "heads": (9, 4, 16),
}
