"""Several linear layers of one input on CPU: one C++ kernel for all, or torch's kernel once for each layer."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.vendor.cpu.compiled import compiled


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    kernel = compiled("linears", x, *weights) if x.dtype is not torch.float64 else None
    if kernel is not None:
        return kernel(x, weights, biases)
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
