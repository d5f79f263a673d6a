"""Linear layers of one input on CPU, one after the other."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
