"""Reasons why a kernel does not take a call, each said once; a rule strings some of them together."""

import torch
from torch import Tensor

from dlinfer.vendor.ascend import chips
from dlinfer.vendor.reasons import dtype, eight_bits, first, where

__all__ = ["HALVES", "LONGEST", "eight_bits", "first", "floating", "lacking", "sizes", "where"]

HALVES = (torch.float16, torch.bfloat16)
LONGEST = 65535
"""Of a product's inner and outer size (npu_quant_matmul, npu_weight_quant_batchmatmul, npu_grouped_matmul)."""


def floating(x: Tensor, of: tuple[torch.dtype, ...] | None = None) -> str | None:
    """A dtype that this card computes in, and of those that an op takes."""
    fitting = [dtype for dtype in chips.current().floats if of is None or dtype in of]
    return dtype(x.dtype, fitting)


def lacking(has: bool, ops: str) -> str | None:
    """This card has the vendor's ops."""
    return None if has else f"{chips.current().name} has no {ops}"


def sizes(*numbers: int) -> str | None:
    """Sizes of a product."""
    longest = max(numbers)
    return None if longest <= LONGEST else f"sizes up to {LONGEST} are served, not {longest}"
