"""Reasons to refuse a call, shared by several kernels."""

import torch
from torch import Tensor

from dlinfer.vendor.reasons import dtype, eight_bits, first, where

__all__ = ["FLOATS", "HALVES", "dtype", "eight_bits", "first", "floating", "where"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)


def floating(x: Tensor) -> str | None:
    """Return a reason to refuse x's dtype; None if the vendor's ops compute in it."""
    return dtype(x.dtype, FLOATS)
