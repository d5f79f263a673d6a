"""Common parts of translations: their table, ONNX's ops, the graph's device, and sizes known only at run time."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard, TypeVar

import torch

from dlinfer.graph.torch_private.dispatcher import OpOverload
from dlinfer.ops.attention.kv_cache import kv_order

Value = Any
"""A value of the model that a translation is writing. onnxscript traces it and gives it no static type."""

Translation = Callable[..., Value]
"""A function from the arguments of an op's call to the call's results."""

Table = Mapping[OpOverload, Translation]

TABLE: dict[OpOverload, Translation] = {}
"""Op -> its standard translation, for the modules imported so far."""

_T = TypeVar("_T", bound=Translation)
_device: ContextVar[str] = ContextVar("_device")


class Untranslated(Exception):
    """A translation cannot write a call. The error's text is the reason."""


def translates(*ops: OpOverload) -> Callable[[_T], _T]:
    """Register the decorated function as the standard translation of some ops."""

    def register(translation: _T) -> _T:
        TABLE.update(dict.fromkeys(ops, translation))
        return translation

    return register


class _Opset:
    """ONNX's ops as attributes, to be called inside a translation. onnxscript is imported at the first use."""

    def __getattr__(self, name: str) -> Translation:
        from onnxscript import values

        return getattr(values.Opset("", 18), name)


op = _Opset()


@contextmanager
def written_for(device_type: str) -> Generator[None]:
    """Set the type of the graph's device for translations that are called in the ``with`` block."""
    token = _device.set(device_type)
    try:
        yield
    finally:
        _device.reset(token)


def cache_order() -> str:
    """Return the order of a KV cache's dimensions that the active vendor uses on the graph's device.

    Only translations may call this.
    """
    return kv_order(_device.get())


def rank(value: Value) -> int:
    return len(value.shape)


def size(value: Value, dim: int) -> int | None:
    """Return an argument's size in a dimension; None if it is symbolic."""
    length = value.shape[dim]
    return length if isinstance(length, int) else None


def fixed(value: Value, dim: int, what: str) -> int:
    """Return an argument's size in a dimension. Raises Untranslated if it is symbolic; the error calls it ``what``."""
    length = size(value, dim)
    if length is None:
        raise Untranslated(f"{what} is not a fixed number")
    return length


def equal_sizes(first: Sequence[Value], second: Sequence[Value]) -> bool:
    """Return whether two shapes are the same for every value of the symbols."""
    return len(first) == len(second) and all(str(a) == str(b) for a, b in zip(first, second, strict=True))


def shape_of(parts: Sequence[Value]) -> Value:
    """Return a shape as a value of the model, for Reshape and Expand.

    Each of ``parts`` is

    - a number;
    - a pair (argument, dimension), which stands for the argument's size in this dimension;
    - a computed value of one element.
    """
    numbers = [size(*part) if _is_size(part) else part for part in parts]
    if all(isinstance(number, int) for number in numbers):
        return op.Constant(value_ints=numbers)
    pieces: list[Value] = []
    for part, number in zip(parts, numbers, strict=True):
        if isinstance(number, int):
            pieces.append(op.Constant(value_ints=[number]))
        elif _is_size(part):
            value, dim = part
            pieces.append(op.Shape(value, start=dim, end=dim + 1))
        else:
            pieces.append(op.Reshape(part, op.Constant(value_ints=[1])))
    return op.Concat(*pieces, axis=0)


def _is_size(part: Value) -> TypeGuard[tuple[Value, int]]:
    return isinstance(part, tuple)


def sizes(value: Value, first: int = 0, end: int | None = None) -> list[tuple[Value, int]]:
    """Return a value's sizes from dimension ``first`` up to ``end``, as pairs (value, dimension) for ``shape_of``."""
    return [(value, dim) for dim in range(rank(value))[first:end]]


def number(value: float | int | bool, like: Value, *, wide: bool = False) -> Value:
    """Return a scalar constant in the dtype of ``like``. wide: use float32 in place of a 16-bit dtype."""
    import onnx_ir

    narrow = wide and is_type(like, "FLOAT16", "BFLOAT16")
    dtype = onnx_ir.DataType.FLOAT if narrow else like.dtype
    return op.Constant(value=onnx_ir.tensor(value, dtype=dtype))


def lowest(like: Value) -> float:
    return torch.finfo(torch_type(like)).min


def torch_type(value: Value) -> torch.dtype:
    """Return torch's dtype for an argument. Raises Untranslated unless it is a float, an int32 or an int64."""
    from onnx_ir import DataType

    names = {DataType.FLOAT: "float32", DataType.DOUBLE: "float64", DataType.FLOAT16: "float16"}
    names |= {DataType.BFLOAT16: "bfloat16", DataType.INT64: "int64", DataType.INT32: "int32"}
    if value.dtype not in names:
        raise Untranslated(f"an argument has type {value.dtype}")
    return getattr(torch, names[value.dtype])


def is_type(value: Value, *names: str) -> bool:
    """Return whether an argument's ONNX type is one of these: FLOAT, DOUBLE, FLOAT16, BOOL, INT64, ..."""
    return value.dtype is not None and value.dtype.name in names


def wide(value: Value) -> tuple[Value, bool]:
    """Cast a floating-point argument to float32 if it is narrower. Return the argument, and whether it was cast."""
    if is_type(value, "FLOAT16", "BFLOAT16"):
        return op.Cast(value, to=1), True
    return value, False
