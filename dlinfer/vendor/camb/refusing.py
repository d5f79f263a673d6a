"""Reasons why a kernel does not take a call, each said once; a rule strings some of them together."""

import torch
from torch import Tensor

from dlinfer.vendor.reasons import dtype, eight_bits, first, where

__all__ = ["FLOATS", "HALVES", "dtype", "eight_bits", "first", "floating", "where"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)


def floating(x: Tensor) -> str | None:
    """A dtype that the vendor's ops compute in."""
    return dtype(x.dtype, FLOATS)
