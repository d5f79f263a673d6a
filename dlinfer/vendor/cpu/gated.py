"""Gated activations of two tensors on CPU, rounded where HF transformers rounds.

The kernels are in C++ (csrc/pointwise/gated.cpp). Only the exact gelu runs on torch, for torch's error function.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.ops.core.checks import FLOATS
from dlinfer.vendor.cpu.compiled import compiled


def gated(activated: Tensor, up: Tensor) -> Tensor:
    """Return activated * up, always contiguous. ``activated`` may be overwritten."""
    if activated.is_contiguous():
        return activated.mul_(up)
    return torch.mul(activated, up, out=up.new_empty(up.shape))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    kernel = compiled("silu_mul", gate, up) if gate.dtype in FLOATS else None
    if kernel is not None:
        return kernel(gate, up)
    return gated(functional.silu(gate), up)


def gelu_mul(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    kernel = compiled("gelu_mul", gate, up) if tanh and gate.dtype in FLOATS else None
    if kernel is not None:
        return kernel(gate, up)
    return gated(functional.gelu(gate, approximate="tanh" if tanh else "none"), up)
