"""Matrix products that torch has under private names."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import torch
from torch import Tensor

__all__ = ["int_mm"]


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of int8 matrices as int32. A CPU without instructions for it may cut sums off."""
    return torch._int_mm(a, b)
