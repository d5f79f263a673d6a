"""Gated activations of two tensors on CPU, rounded where HF transformers rounds."""

import torch
from torch import Tensor
from torch.nn import functional


def gated(activated: Tensor, up: Tensor) -> Tensor:
    """The product, packed whatever the strides of its factors. ``activated`` may be overwritten."""
    if activated.is_contiguous():
        return activated.mul_(up)
    return torch.mul(activated, up, out=up.new_empty(up.shape))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return gated(functional.silu(gate), up)


def gelu_mul(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    return gated(functional.gelu(gate, approximate="tanh" if tanh else "none"), up)
