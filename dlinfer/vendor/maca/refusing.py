"""Reasons why a kernel does not take a call, each said once, and how tensors are laid out for one that does."""

import torch
from torch import Tensor

from dlinfer.vendor.reasons import dtype, eight_bits, first, where

__all__ = ["FLOATS", "HALVES", "copied_rows", "eight_bits", "first", "floating", "multiples", "rows", "where"]

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
_ALIGNED = 16
"""Bytes: mcoplib reads numbers of 16 bits by eight, some kernels without asking where a tensor begins."""


def floating(x: Tensor, of: tuple[torch.dtype, ...] = FLOATS) -> str | None:
    """A dtype that an op takes."""
    return dtype(x.dtype, of)


def multiples(of: int, **sizes: int) -> str | None:
    """Sizes that have to be multiples of a number."""
    bad = {name: size for name, size in sizes.items() if size % of}
    return f"multiples of {of} are served, not {bad}" if bad else None


def rows(x: Tensor) -> Tensor:
    """x [..., size] as rows [n, size] without gaps that begin where vectors do; a view where it lies so already."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return flat.clone() if flat.data_ptr() % _ALIGNED else flat


def copied_rows(x: Tensor) -> Tensor:
    """The same, never x's own memory: for ops that write into their arguments."""
    flat = rows(x)
    return flat.clone() if flat.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else flat
