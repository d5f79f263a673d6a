"""Reasons to refuse a call that several kernels share."""

import torch
from torch import Tensor

from dlinfer.vendor.reasons import dtype, eight_bits, first, where

__all__ = ["FLOATS", "HALVES", "dtype", "eight_bits", "first", "floating", "where"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)


def floating(x: Tensor) -> str | None:
    """Return the reason to refuse a dtype that the vendor's ops do not compute in, or None."""
    return dtype(x.dtype, FLOATS)
