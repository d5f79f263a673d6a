"""Reasons to refuse a call, shared by several kernels, and the memory layout of tensors for the ops."""

import torch
from torch import Tensor

from dlinfer.vendor.reasons import dtype, eight_bits, first, where

__all__ = ["FLOATS", "HALVES", "copied_rows", "eight_bits", "first", "floating", "multiples", "rows", "where"]

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
_ALIGNED = 16
"""The alignment of rows in bytes. mcoplib reads eight 16-bit numbers at once; not all kernels check the address."""


def floating(x: Tensor, of: tuple[torch.dtype, ...] = FLOATS) -> str | None:
    """Return a reason to refuse x's dtype; None if the op takes it. of: the dtypes that the op takes."""
    return dtype(x.dtype, of)


def multiples(of: int, **sizes: int) -> str | None:
    """Return a reason to refuse a call if one of ``sizes`` is not a multiple of ``of``; else None."""
    bad = {name: size for name, size in sizes.items() if size % of}
    return f"multiples of {of} are supported, not {bad}" if bad else None


def rows(x: Tensor) -> Tensor:
    """Reshape x [..., size] to contiguous, aligned rows [n, size]: a view if possible."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return flat.clone() if flat.data_ptr() % _ALIGNED else flat


def copied_rows(x: Tensor) -> Tensor:
    """Return ``rows(x)``, but never in x's own memory, for ops that write into their arguments."""
    flat = rows(x)
    return flat.clone() if flat.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else flat
