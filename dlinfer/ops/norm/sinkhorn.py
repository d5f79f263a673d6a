"""Doubly stochastic matrices for hyper-connections, as in DeepSeek-V4."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op

TOLERANCES = {
    torch.float32: Tolerance(2e-5, 1e-6, "dozens of divisions by sums in float32"),
    torch.float16: Tolerance(2e-3, 1e-4, "computed in float32 and rounded once"),
    torch.bfloat16: Tolerance(1.6e-2, 1e-4, "computed in float32 and rounded once"),
}


@fused_op(tolerances=TOLERANCES)
def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """Turn scores into matrices whose rows and columns sum to about 1 (Sinkhorn and Knopp, 1967).

    The first step is softmax(scores) of each row plus eps, divided by the sums of columns plus eps. Each further
    iteration divides by the sums of rows plus eps, and then by the sums of columns plus eps. (DeepSeek-V4, 2026,
    section 2.2, as transformers' DeepseekV4HyperConnection computes it.)

    scores: [..., n, n], float32, float16 or bfloat16, any strides. iterations: 1 or more.

    Returns a new tensor of scores' shape and dtype. Nothing is mutated. Computed in float32 at least and rounded once.
    Raises OpArgumentError.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    matrices = scores.to(dtype).softmax(-1) + eps
    matrices = matrices / (matrices.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrices = matrices / (matrices.sum(-1, keepdim=True) + eps)
        matrices = matrices / (matrices.sum(-2, keepdim=True) + eps)
    return matrices.to(scores.dtype).contiguous()


sinkhorn.takes(
    scores="float [..., rows, columns]",
    returns="like scores [*scores]",
)


@sinkhorn.check
def _check_sinkhorn(rules: Rules, scores: Tensor, iterations: int) -> None:
    shape = scores.shape
    rules.require(shape[-1] == shape[-2], "scores", "square matrices", lambda: tuple(shape))
    rules.require(iterations >= 1, "iterations", "at least 1", lambda: iterations)


@sinkhorn.samples
def _sinkhorn_samples(make: SampleMaker) -> Iterator[Sample]:
    yield Sample("one token", (make.tensor(1, 1, 4, 4), 20, 1e-6))
    yield Sample("many tokens", (make.tensor(33, 4, 4), 3, 1e-6))
    yield Sample("no tokens", (make.tensor(0, 4, 4), 20, 1e-6))
    yield Sample("one iteration, strided", (make.tensor(5, 2, 3).transpose(1, 2)[:, :2], 1, 1e-3))
    yield Sample("large scores", (make.tensor(7, 4, 4, scale=30.0), 20, 1e-6))
