"""Ops of torch's dispatcher and higher-order ops."""

import torch
from torch._higher_order_ops.effects import _get_effect
from torch._ops import HigherOrderOperator, OpOverload

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "has_registered_effect",
    "is_dispatched",
]


def is_dispatched(name: str) -> bool:
    """Whether an op, ``aten::add.Tensor``, is one of torch's dispatcher; TorchScript has others, ``aten::save``."""
    return torch._C._dispatch_has_kernel(name)


def has_registered_effect(op: OpOverload) -> bool:
    """Whether an op is registered as effectful (``torch.library``, ``CustomOpDef.register_effect``)."""
    return _get_effect(op) is not None
