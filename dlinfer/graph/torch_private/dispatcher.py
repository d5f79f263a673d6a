"""Ops of torch's dispatcher and higher-order ops."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

import functools
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch._higher_order_ops.effects import _get_effect
from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["HigherOrderOperator", "OpOverload"]

if TYPE_CHECKING:
    Op: TypeAlias = OpOverload[..., Any]
else:
    Op = OpOverload  # it takes no parameters on every torch


def is_op(target: object) -> TypeGuard[Op]:
    """Whether a node's target is an op of torch's dispatcher."""
    return isinstance(target, OpOverload)


def schema_of(op: Op) -> torch.FunctionSchema:
    """The op's schema."""
    return op._schema


@functools.cache
def parameters_of(op: Op) -> tuple[torch.Argument, ...]:
    """The parameters of the op's schema. The cache matters: torch builds a new list at each access."""
    return tuple(op._schema.arguments)


def is_dispatched(name: str) -> bool:
    """Whether an op, ``aten::add.Tensor``, is one of torch's dispatcher; TorchScript has others, ``aten::save``."""
    return torch._C._dispatch_has_kernel(name)


def op_names() -> set[str]:
    """The names of all ops of the dispatcher: ``aten.add.Tensor``, and ``aten.add`` for all overloads."""
    overloads = torch._C._dispatch_get_all_op_names()
    packets = {name.partition(".")[0] for name in overloads}
    return {name.replace("::", ".") for name in packets.union(overloads)}


def has_registered_effect(op: Op) -> bool:
    """Whether an op is registered as effectful (``torch.library``, ``CustomOpDef.register_effect``)."""
    return _get_effect(op) is not None
