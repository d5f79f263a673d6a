"""Matrix products that torch has under private names."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import torch
from torch import Tensor

__all__ = ["int_mm"]


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of two int8 matrices as int32. A CPU without int8 dot products may saturate partial sums."""
    return torch._int_mm(a, b)
