"""Predicates about the nodes of a pattern: the called function, the dtype, the shape.

A predicate is False if its answer depends on the values of symbols. This is safe: a rule that does not fire costs only
speed, but a rule that fires wrongly gives wrong results.
"""

from typing import TypeGuard

import torch
from torch import fx
from torch.fx.node import Argument

from dlinfer.graph.ir.dialect import tensor_of, tensor_or_none
from dlinfer.graph.ir.layout import same_sizes

aten = torch.ops.aten

ADD = (aten.add.Tensor, aten.add.Scalar)
MUL = (aten.mul.Tensor, aten.mul.Scalar)
CASTS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
    aten._to_copy.default,
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""The dtypes that fused ops take."""

LAST = torch.iinfo(torch.int64).max
"""The ``end`` of a slice up to the end of its dimension."""


def calls(value: Argument, *ops: object) -> TypeGuard[fx.Node]:
    """Return whether an argument is a node that calls one of these functions."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in ops


def is_tensor(value: Argument) -> TypeGuard[fx.Node]:
    return tensor_or_none(value) is not None


def is_number(value: Argument) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def dtype_of(node: fx.Node) -> torch.dtype:
    return tensor_of(node).dtype


def rank_of(node: fx.Node) -> int:
    return tensor_of(node).dim()


def same_kind(first: fx.Node, second: fx.Node) -> bool:
    left, right = tensor_of(first), tensor_of(second)
    return left.dtype is right.dtype and left.device == right.device


def same_shape(first: fx.Node, second: fx.Node) -> bool:
    """Return whether two nodes' tensors certainly have the same shape."""
    return same_sizes(tensor_of(first).shape, tensor_of(second).shape)


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the node's only user; None if it has no user or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def cast_source(node: Argument) -> fx.Node | None:
    """Return the argument of a cast; None if ``node`` is not a cast, or casts to another device."""
    if not calls(node, *CASTS):
        return None
    source = node.args[0]
    if not is_tensor(source) or not is_tensor(node) or tensor_of(source).device != tensor_of(node).device:
        return None
    return source


def widened_from(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Follow exact casts upwards from ``node``. Return the tensor above all casts, and the casts, the nearest first.

    A cast is exact if it goes from a float to the same or a wider float.
    """
    casts: list[fx.Node] = []
    while (source := cast_source(node)) is not None and _is_exact(dtype_of(source), dtype_of(node)):
        casts.append(node)
        node = source
    return node, tuple(casts)


def _is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    return source.is_floating_point and (source is target or target in _WIDER.get(source, ()))


_WIDER = {
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
