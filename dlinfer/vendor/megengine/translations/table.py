"""The table of translations, and helpers for them.

A translation is a function that adds one of torch's ops to a node list. It takes the list, the fake tensor of the op's
result, and the op's arguments by name. For arguments that it does not support it raises UntranslatableError."""

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
    """Decorate a function as the translation of the overloads ``targets``.

    mixed: False refuses every tensor argument that is not float32. True leaves the check of dtypes to the function."""

    def register(function: Translation) -> Translation:
        def of_floats(writer: NodeList, result: Any, **arguments: Any) -> Any:
            float32(*arguments.values())
            return function(writer, result, **arguments)

        TABLE.update(dict.fromkeys(targets, function if mixed else of_floats))
        return function

    return register


def defaults(names: str) -> list[Any]:
    """Return the ``default`` overload of each aten op in ``names``, which is separated by spaces."""
    return [getattr(aten, name).default for name in names.split()]


def float32(*values: Any) -> None:
    """Raise UntranslatableError for a tensor that is not float32. values: a list among them is searched too."""
    for value in values:
        if isinstance(value, (list, tuple)):
            float32(*value)
        elif isinstance(value, Value) and value.dtype != torch.float32:
            kind = str(value.dtype).removeprefix("torch.")
            raise UntranslatableError(f"it computes with {kind}; MegEngine's results would differ")


def truth(writer: NodeList, value: Value) -> Value:
    """Return a torch bool as MegEngine's bool. An input of the network arrives as bytes, so it is compared with 0."""
    if value.dtype != torch.bool:
        raise UntranslatableError("a condition is not bool")
    if any(value.name == name for name, _, _ in writer.inputs):
        return writer.op("not_equal", value, 0, like=value, dtype=torch.bool)
    return value


def reshaped(writer: NodeList, value: Value, shape: Sequence[int]) -> Value:
    return writer.op("reshape", value, like=shape, shape=list(shape))


def broadcast(writer: NodeList, value: Value, shape: tuple[int, ...]) -> Value:
    return value if value.shape == shape else writer.op("broadcast", value, like=shape, shape=list(shape))


def full(writer: NodeList, like: Any, value: float) -> Value:
    """Return a tensor of ``like``'s sizes that is filled with a number.

    It is not made by arithmetic on ``like``, such as like * 0, because NaN and infinities would stay."""
    sizes = [int(size) for size in like.shape]
    return writer.op("full", like=like, dtype=torch.float32, value=value, shape=sizes)


def movable(writer: NodeList, value: Value) -> Value:
    """Return a value in the form for ops that only move elements: float32, or MegEngine's bool.

    Raises UntranslatableError for other dtypes."""
    if value.dtype == torch.bool:
        return truth(writer, value)
    float32(value)
    return value
