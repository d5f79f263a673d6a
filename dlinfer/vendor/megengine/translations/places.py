"""Translations of views, and of ops that only move elements."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dlinfer.vendor.megengine.nodes import NodeList, Value
from dlinfer.vendor.megengine.translations.table import (
    aten,
    broadcast,
    defaults,
    movable,
    reshaped,
    translation,
)


@translation(*defaults("view reshape _unsafe_view unsqueeze squeeze"), mixed=True)
@translation(aten.flatten.using_ints, aten.unflatten.int, aten.squeeze.dim, aten.squeeze.dims, mixed=True)
def _reshape(writer: NodeList, result: Tensor, **arguments: Any) -> Value:
    return reshaped(writer, movable(writer, arguments["self"]), result.shape)


@translation(*defaults("contiguous clone alias detach dropout lift_fresh_copy"), mixed=True)
def _same(writer: NodeList, result: Tensor, **arguments: Any) -> Value:
    return next(value for value in arguments.values() if isinstance(value, Value))


@translation(aten.transpose.int, mixed=True)
def _transpose(writer: NodeList, result: Tensor, self: Value, dim0: int, dim1: int) -> Value:
    order = list(range(len(self.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return writer.op("transpose", movable(writer, self), like=result, order=order)


translation(aten.t.default, mixed=True)(
    lambda writer, result, self: self if len(self.shape) < 2 else _transpose(writer, result, self, 0, 1)
)


@translation(aten.permute.default, mixed=True)
def _permute(writer: NodeList, result: Tensor, self: Value, dims: Sequence[int]) -> Value:
    order = [dim % len(self.shape) for dim in dims]
    return writer.op("transpose", movable(writer, self), like=result, order=order)


@translation(aten.expand.default, mixed=True)
def _expand(writer: NodeList, result: Tensor, self: Value, **_: Any) -> Value:
    return broadcast(writer, movable(writer, self), tuple(result.shape))


def part(writer: NodeList, value: Value, dim: int, start: int, stop: int, step: int = 1) -> Value:
    """Return value[start:stop:step] in the dimension ``dim``."""
    axis = dim % len(value.shape)
    count = len(range(start, stop, step))
    shape = [count if index == axis else size for index, size in enumerate(value.shape)]
    return writer.op(
        "subtensor", movable(writer, value), like=shape, axis=axis, start=start, stop=stop, step=step
    )


@translation(aten.slice.Tensor, mixed=True)
def _slice(
    writer: NodeList,
    result: Tensor,
    self: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    size = self.shape[dim]
    first, last, every = slice(start, end, step).indices(size)
    return part(writer, self, dim, first, last, every)


@translation(aten.select.int, mixed=True)
def _select(writer: NodeList, result: Tensor, self: Value, dim: int, index: int) -> Value:
    place = index % self.shape[dim]
    return reshaped(writer, part(writer, self, dim, place, place + 1), result.shape)


@translation(
    aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, mixed=True
)
def _split(writer: NodeList, result: Sequence[Tensor], dim: int = 0, **arguments: Any) -> list[Value]:
    parts, start = [], 0
    for tensor in result:
        stop = start + tensor.shape[dim]
        parts.append(part(writer, arguments["self"], dim, start, stop))
        start = stop
    return parts


@translation(aten.unbind.int, mixed=True)
def _unbind(writer: NodeList, result: Sequence[Tensor], self: Value, dim: int = 0) -> list[Value]:
    return [_select(writer, tensor, self, dim, index) for index, tensor in enumerate(result)]


@translation(aten.cat.default)
def _cat(writer: NodeList, result: Tensor, tensors: Sequence[Value], dim: int = 0) -> Value:
    return writer.op("concat", *tensors, like=result, axis=dim % result.ndim)


@translation(aten.stack.default)
def _stack(writer: NodeList, result: Tensor, tensors: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % result.ndim
    shape = [1 if index == axis else size for index, size in enumerate(result.shape)]
    lifted = [reshaped(writer, tensor, shape) for tensor in tensors]
    return writer.op("concat", *lifted, like=result, axis=axis)
