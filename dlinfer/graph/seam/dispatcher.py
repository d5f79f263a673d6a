"""Ops of torch's dispatcher and higher-order ops."""

import torch
from torch._ops import HigherOrderOperator, OpOverload

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "is_dispatched",
]


def is_dispatched(name: str) -> bool:
    """Whether an op, ``aten::add.Tensor``, is one of torch's dispatcher; TorchScript has others, ``aten::save``."""
    return torch._C._dispatch_has_kernel(name)
