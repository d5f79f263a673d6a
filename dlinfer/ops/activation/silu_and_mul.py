"""The gated activation of one tensor that holds gate and up (Shazeer, 2020, arXiv:2002.05202)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op

_ROUNDING = "silu is computed in float32 and rounded to the tensor's dtype before the product is"
TOLERANCES = {
    torch.float32: Tolerance(2e-6, 1e-6, "one exponential, one division, two products in float32"),
    torch.float16: Tolerance(2e-3, 1e-4, _ROUNDING),
    torch.bfloat16: Tolerance(1.6e-2, 1e-4, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def silu_and_mul(x: Tensor) -> Tensor:
    """Compute silu(gate) * up, where gate and up are the halves of the last dimension, and silu(a) = a / (1 + exp(-a)).

    x: [..., 2 * intermediate], float32, float16 or bfloat16, any strides.

    Returns a new tensor [..., intermediate] of x's dtype. Nothing is mutated. silu(gate) is rounded to x's dtype before
    the product, as in HF transformers' gated MLPs, which compute both separately. Raises OpArgumentError.
    """
    gate, up = x.chunk(2, dim=-1)
    return (functional.silu(gate) * up).contiguous()


silu_and_mul.takes(
    x="float [..., width]",
    returns="like x [..., width // 2]",
)


@silu_and_mul.check
def _check_silu_and_mul(rules: Rules, x: Tensor) -> None:
    rules.require(x.shape[-1] % 2 == 0, "x", "an even last dimension", lambda: tuple(x.shape))


@silu_and_mul.samples
def _silu_and_mul_samples(make: SampleMaker) -> Iterator[Sample]:
    for name, shape in {
        "one token": (1, 1, 64),
        "many tokens": (1, 33, 96),
        "no tokens": (1, 0, 32),
        "2-d": (5, 48),
    }.items():
        yield Sample(name, (make.tensor(*shape),))
    yield Sample("strided", (make.tensor(7, 64)[:, 16:48],))
    yield Sample("large values", (make.tensor(3, 64, scale=50.0),))
