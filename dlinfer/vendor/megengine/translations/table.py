"""The table of translations, and helpers for them.

A translation adds one of torch's ops to a node list. It is a function of the list, the fake of the node's result, and
the op's arguments by name. For a call that it does not serve it raises UntranslatableError with the reason."""

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
    """Register a function as the translation of overloads. All tensors must be float32, unless ``mixed`` is True.

    In that case the function itself checks dtypes."""

    def register(function: Translation) -> Translation:
        def of_floats(writer: NodeList, result: Any, **arguments: Any) -> Any:
            float32(*arguments.values())
            return function(writer, result, **arguments)

        TABLE.update(dict.fromkeys(targets, function if mixed else of_floats))
        return function

    return register


def defaults(names: str) -> list[Any]:
    """Return the overload ``default`` of each of aten's ops with these names, which spaces separate."""
    return [getattr(aten, name).default for name in names.split()]


def float32(*values: Any) -> None:
    """Raise UntranslatableError if a value, also in a list, is a tensor that is not float32."""
    for value in values:
        if isinstance(value, (list, tuple)):
            float32(*value)
        elif isinstance(value, Value) and value.dtype != torch.float32:
            kind = str(value.dtype).removeprefix("torch.")
            raise UntranslatableError(f"it computes with {kind}; MegEngine's results would differ")


def truth(writer: NodeList, value: Value) -> Value:
    """Return a condition as a bool of MegEngine. An input of bool arrives as bytes, which are compared with 0."""
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
    """Fill a tensor of ``like``'s sizes with a number. Arithmetic on ``like`` would spread its NaN and infinities."""
    sizes = [int(size) for size in like.shape]
    return writer.op("full", like=like, dtype=torch.float32, value=value, shape=sizes)


def movable(writer: NodeList, value: Value) -> Value:
    """Return a value for ops that move elements: float32, or bool as MegEngine's bool. Raises UntranslatableError."""
    if value.dtype == torch.bool:
        return truth(writer, value)
    float32(value)
    return value
