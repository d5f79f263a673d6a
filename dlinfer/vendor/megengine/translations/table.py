"""The table of translations, and their helpers.

A translation writes one of torch's ops into a node list. It is a function of the writer, the node's fake result, and
the op's arguments by name. It raises UntranslatableError, with the reason, for a call that it does not serve.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dlinfer import ops
from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value

aten = torch.ops.aten
assert ops  # imported for torch.ops.dlinfer
ours = torch.ops.dlinfer

Translation = Callable[..., Any]
TABLE: dict[Any, Translation] = {}


def translation(*targets: Any, mixed: bool = False) -> Callable[[Translation], Translation]:
    """Register a function for overloads. All tensors must be float32, unless ``mixed``: then it checks them itself."""

    def register(function: Translation) -> Translation:
        def of_floats(writer: NodeList, result: Any, **arguments: Any) -> Any:
            float32(*arguments.values())
            return function(writer, result, **arguments)

        TABLE.update(dict.fromkeys(targets, function if mixed else of_floats))
        return function

    return register


def defaults(names: str) -> list[Any]:
    """Return the overloads ``default`` of aten's ops of these names."""
    return [getattr(aten, name).default for name in names.split()]


def float32(*values: Any) -> None:
    """Raise UntranslatableError for a tensor that is not float32, also in lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            float32(*value)
        elif isinstance(value, Value) and value.dtype != torch.float32:
            kind = str(value.dtype).removeprefix("torch.")
            raise UntranslatableError(f"it computes with {kind}; MegEngine's results would differ")


def truth(writer: NodeList, value: Value) -> Value:
    """Return a condition as MegEngine's bool; an input of bool arrives as bytes."""
    if value.dtype != torch.bool:
        raise UntranslatableError("a condition that is not bool")
    if any(value.name == name for name, _, _ in writer.inputs):
        return writer.op("not_equal", value, 0, like=value, dtype=torch.bool)
    return value


def reshaped(writer: NodeList, value: Value, shape: Sequence[int]) -> Value:
    return writer.op("reshape", value, like=shape, shape=list(shape))


def broadcast(writer: NodeList, value: Value, shape: tuple[int, ...]) -> Value:
    return value if value.shape == shape else writer.op("broadcast", value, like=shape, shape=list(shape))


def full(writer: NodeList, like: Any, value: float) -> Value:
    """Fill a tensor of ``like``'s sizes with a number; arithmetic on ``like`` would spread its NaN and infinities."""
    sizes = [int(size) for size in like.shape]
    return writer.op("full", like=like, dtype=torch.float32, value=value, shape=sizes)


def movable(writer: NodeList, value: Value) -> Value:
    """Return a value that ops may move: float32, or bool as MegEngine's bool. Raises UntranslatableError."""
    if value.dtype == torch.bool:
        return truth(writer, value)
    float32(value)
    return value
