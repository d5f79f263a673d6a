"""Reasons to refuse a call, shared by several kernels."""

import torch
from torch import Tensor

from dlinfer.vendor.ascend import chips
from dlinfer.vendor.reasons import dtype, eight_bits, first, where

__all__ = ["HALVES", "LONGEST", "eight_bits", "first", "floating", "lacking", "sizes", "where"]

HALVES = (torch.float16, torch.bfloat16)
LONGEST = 65535
"""The most rows or columns of a weight (npu_quant_matmul, npu_weight_quant_batchmatmul, npu_grouped_matmul)."""


def floating(x: Tensor, of: tuple[torch.dtype, ...] | None = None) -> str | None:
    """Return a reason to refuse x's dtype; None if the op takes it on this card.

    of: the dtypes that the op takes; None means all.
    """
    fitting = [dtype for dtype in chips.current().floats if of is None or dtype in of]
    return dtype(x.dtype, fitting)


def lacking(has: bool, ops: str) -> str | None:
    """Return a reason to refuse a call if this card lacks ``ops``; else None. has: whether it has them (``Chip``)."""
    return None if has else f"{chips.current().name} has no {ops}"


def sizes(*numbers: int) -> str | None:
    """Return a reason to refuse a matrix product with weights of these sizes; None if the vendor's op takes them."""
    longest = max(numbers)
    return None if longest <= LONGEST else f"sizes up to {LONGEST} are supported, not {longest}"
