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
    return isinstance(target, OpOverload)


def schema_of(op: Op) -> torch.FunctionSchema:
    return op._schema


@functools.cache
def parameters_of(op: Op) -> tuple[torch.Argument, ...]:
    """Return the parameters of the op's schema, cached because torch builds a new list at each access."""
    return tuple(op._schema.arguments)


def is_dispatched(name: str) -> bool:
    """Return whether torch's dispatcher has ``name``, such as ``aten::add.Tensor``; it lacks TorchScript's ops."""
    return torch._C._dispatch_has_kernel(name)


def op_names() -> set[str]:
    """Return the names of the dispatcher's ops: each overload, ``aten.add.Tensor``, and each packet, ``aten.add``."""
    overloads = torch._C._dispatch_get_all_op_names()
    packets = {name.partition(".")[0] for name in overloads}
    return {name.replace("::", ".") for name in packets.union(overloads)}


def has_registered_effect(op: Op) -> bool:
    """Return whether an op is registered as effectful (``torch.library``, ``CustomOpDef.register_effect``)."""
    return _get_effect(op) is not None
