"""Gated activations of two tensors on CPU, rounded where HF transformers rounds."""

from torch import Tensor
from torch.nn import functional


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate).mul_(up)


def gelu_mul(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    return functional.gelu(gate, approximate="tanh" if tanh else "none").mul_(up)
