"""Matrix products with weights."""

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Lower to torch's linear, which torchair converts (``MatMul``)."""
    return functional.linear(x, weight, bias)
