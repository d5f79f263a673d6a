"""Gated activations of two tensors, gate and up (Shazeer, 2020, arXiv:2002.05202).

Both may be strided views. So the two halves of a tensor for ``silu_and_mul`` can be passed without a copy.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op

_ROUNDING = "the activation is computed in float32 and rounded to the tensor's dtype before the product is"
TOLERANCES = {
    torch.float32: Tolerance(2e-6, 1e-6, "one transcendental function and a few products in float32"),
    torch.float16: Tolerance(2e-3, 1e-4, _ROUNDING),
    torch.bfloat16: Tolerance(1.6e-2, 1e-4, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, where silu(a) = a / (1 + exp(-a)).

    gate, up: [..., intermediate] of one shape, float32, float16 or bfloat16, any strides.

    Returns a new tensor of gate's shape and dtype. Nothing is mutated. silu(gate) is rounded to the dtype before the
    product, as in HF transformers' gated MLPs, which compute both separately. Raises OpArgumentError.
    """
    return (functional.silu(gate) * up).contiguous()


@fused_op(tolerances=TOLERANCES)
def gelu_mul(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    """Compute gelu(gate) * up, where gelu(a) = a * P(X <= a) for a standard normal X (arXiv:1606.08415).

    gate, up: [..., intermediate] of one shape, float32, float16 or bfloat16, any strides.
    tanh: compute gelu(a) by the approximation 0.5 a (1 + tanh(sqrt(2 / pi) (a + 0.044715 a^3))).

    Returns a new tensor of gate's shape and dtype. Nothing is mutated. gelu(gate) is rounded to the dtype before the
    product, as in HF transformers' gated MLPs, which compute both separately. Raises OpArgumentError.
    """
    return (functional.gelu(gate, approximate="tanh" if tanh else "none") * up).contiguous()


silu_mul.takes(
    gate="float [...]",
    up="like gate [*gate]",
    returns="like gate [*gate]",
)

gelu_mul.takes(
    gate="float [...]",
    up="like gate [*gate]",
    returns="like gate [*gate]",
)


def _pairs(make: SampleMaker) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name, shape in {
        "one token": (1, 1, 32),
        "many tokens": (1, 33, 48),
        "no tokens": (1, 0, 16),
        "2-d": (5, 24),
    }.items():
        yield name, make.tensor(*shape), make.tensor(*shape)
    packed = make.tensor(7, 64)
    yield "halves of one tensor", packed[:, :32], packed[:, 32:]
    lying_otherwise = make.tensor(16, 3, 2).permute(2, 1, 0)
    yield "gate has other strides", lying_otherwise, make.tensor(2, 3, 16)
    yield "up has other strides", make.tensor(2, 3, 16), lying_otherwise
    yield "large values", make.tensor(3, 32, scale=50.0), make.tensor(3, 32)


@silu_mul.samples
def _silu_mul_samples(make: SampleMaker) -> Iterator[Sample]:
    for name, gate, up in _pairs(make):
        yield Sample(name, (gate, up))


@gelu_mul.samples
def _gelu_mul_samples(make: SampleMaker) -> Iterator[Sample]:
    for tanh in (False, True):
        for name, gate, up in _pairs(make):
            yield Sample(f"{'tanh' if tanh else 'exact'}, {name}", (gate, up, tanh))
