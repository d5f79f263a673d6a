"""The table of translations, and what they share.

A translation writes one of torch's ops into a node list: a function of the writer, the node's fake result, and the op's
arguments by name. It raises UntranslatableError, with the reason, for a call that it does not serve.
"""

from collections.abc import Callable
from typing import Any

import torch

from dlinfer import ops
from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value

aten = torch.ops.aten
assert ops  # imported for torch.ops.dlinfer
ours = torch.ops.dlinfer

Translation = Callable[..., Any]
TABLE: dict[Any, Translation] = {}


def translation(*targets: Any) -> Callable[[Translation], Translation]:
    """Register a function for overloads."""

    def register(function: Translation) -> Translation:
        TABLE.update(dict.fromkeys(targets, function))
        return function

    return register


def float32(*values: Any) -> None:
    """Raise UntranslatableError where a value is no float32 tensor."""
    for value in values:
        if isinstance(value, Value) and value.dtype != torch.float32:
            kind = str(value.dtype).removeprefix("torch.")
            raise UntranslatableError(f"it computes with {kind}; MegEngine's numbers would be other ones")


def axis_of(dim: int, rank: int) -> int:
    """Return a dimension counted from the first one."""
    return dim % rank


def truth(writer: NodeList, value: Value) -> Value:
    """Return a condition as MegEngine's: an input of bool is bytes at the boundary."""
    if value.dtype != torch.bool:
        raise UntranslatableError("a condition that is no bool")
    if any(value.name == name for name, _, _ in writer.inputs):
        return writer.op("not_equal", value, 0, like=value, dtype=torch.bool)
    return value


def broadcast(writer: NodeList, value: Value, shape: tuple[int, ...]) -> Value:
    """Return a value in these sizes."""
    return value if value.shape == shape else writer.op("broadcast", value, like=shape, shape=list(shape))


def full(writer: NodeList, like: Any, value: float) -> Value:
    """A number everywhere, in the sizes of a tensor, whose NaN and infinities arithmetic with it would bring in."""
    sizes = [int(size) for size in like.shape]
    return writer.op("full", like=like, dtype=torch.float32, value=value, shape=sizes)


def movable(writer: NodeList, value: Value) -> Value:
    """Return a value that may be moved about: integers only look up rows, and an input of bool is bytes."""
    if value.dtype == torch.bool:
        return truth(writer, value)
    float32(value)
    return value
