"""Views, permutations, repetitions and concatenations."""

from collections.abc import Sequence
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.graph.engine_kit.empty_operands import without_elements
from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.vendor.openvino.builder import Builder, Size
from dlinfer.vendor.openvino.registry import Call, defaults, lowers

aten = torch.ops.aten
I64 = ov.Type.i64


def rank(x: Output) -> int:
    return len(x.get_partial_shape())


def leading(b: Builder, x: Output, dims: int) -> Output:
    """Add dimensions of size 1 in front until the rank of x is ``dims``."""
    missing = dims - rank(x)
    return op.unsqueeze(x, b.axes(list(range(missing)))).output(0) if missing > 0 else x


def channels(b: Builder, x: Output, dims: int) -> Output:
    """Reshape x from [channels] to [1, channels, 1, ...], of rank ``dims``."""
    return op.reshape(x, b.axes([1, -1, *([1] * (dims - 2))]), False).output(0)


def to_result(b: Builder, x: Output, sizes: Sequence[Size] | None = None) -> Output:
    """Reshape x to the sizes of the call's result. sizes: these sizes as values, if the caller knows them."""
    old, new = b.call.fake("self").shape, b.result.shape
    return b.shaped(x, old, new, sizes_of(b, x, old, new) if sizes is None else sizes)


def sizes_of(b: Builder, x: Output, old: Sequence[Any], new: Sequence[Any]) -> list[Size]:
    """Return the sizes ``new`` of a fake tensor as values of the model: fixed numbers, or sizes of x.

    At most one size may be neither; it is computed from the number of elements.
    old: the sizes of the fake tensor of x."""
    values: list[Size] = []
    for size in new:
        fixed = fixed_size(size)
        same = [dim for dim, symbol in enumerate(old) if str(symbol) == str(size)]
        values.append(fixed if fixed is not None else b.size(x, same[0]) if same else -1)
    unknown = [index for index, size in enumerate(values) if isinstance(size, int) and size == -1]
    if len(unknown) > 1:
        raise ValueError(f"sizes {list(new)} do not follow from {list(old)}")
    for index in unknown:  # -1 would be ambiguous for a tensor without elements
        whole = op.reduce_prod(op.shape_of(x, "i64"), b.axes([0]), False)
        others = [size for position, size in enumerate(values) if position != index]
        rest = op.reduce_prod(b.numbers(others), b.axes([0]), False) if others else b.scalar(1, I64)
        rest = op.maximum(rest, b.scalar(1, I64))
        values[index] = op.divide(whole, rest).output(0)
    return values


def _computes_sizes_of_nothing(call: Call) -> str | None:
    """Return a reason to refuse an empty result of varying sizes; None for other results.

    OpenVINO skips the ops that compute the sizes of an empty result.
    """
    sizes = list(map(fixed_size, call.result.shape))
    return without_elements(call.name) if 0 in sizes and None in sizes else None


@lowers(*defaults("view reshape _unsafe_view _reshape_alias"), refuses=_computes_sizes_of_nothing)
def view(b: Builder, x: Output, size: list[Size], *_: Any) -> Output:
    known = None if any(isinstance(length, int) and length == -1 for length in size) else size
    return to_result(b, x, known)


@lowers(aten.view_as.default, aten.reshape_as.default, refuses=_computes_sizes_of_nothing)
def view_as(b: Builder, x: Output, other: Output) -> Output:
    return to_result(b, x, [b.size(other, dim) for dim in range(rank(other))])


@lowers(*defaults("squeeze unsqueeze ravel"), refuses=_computes_sizes_of_nothing)
@lowers(aten.flatten.using_ints, aten.unflatten.int, refuses=_computes_sizes_of_nothing)
@lowers(aten.squeeze.dim, aten.squeeze.dims, refuses=_computes_sizes_of_nothing)
def reshaped(b: Builder, x: Output, *_: Any) -> Output:
    return to_result(b, x)


def permuted(b: Builder, x: Output, order: Sequence[int]) -> Output:
    if list(order) == list(range(rank(x))):
        return x
    return op.transpose(x, b.axes(order)).output(0)


@lowers(aten.permute.default)
def permute(b: Builder, x: Output, dims: list[int]) -> Output:
    return permuted(b, x, [dim % rank(x) for dim in dims])


@lowers(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
def transpose(b: Builder, x: Output, dim0: int, dim1: int) -> Output:
    if rank(x) == 0:
        return x
    order = list(range(rank(x)))
    first, second = dim0 % rank(x), dim1 % rank(x)
    order[first], order[second] = second, first
    return permuted(b, x, order)


@lowers(aten.t.default, aten.numpy_T.default, aten.mT.default, aten.adjoint.default)
def t(b: Builder, x: Output) -> Output:
    if rank(x) < 2:
        return x
    if b.call.target is aten.numpy_T.default:
        return permuted(b, x, list(range(rank(x)))[::-1])
    return transpose(b, x, -2, -1)


@lowers(aten.movedim.int, aten.moveaxis.int, aten.movedim.intlist, aten.moveaxis.intlist)
def movedim(b: Builder, x: Output, source: Any, destination: Any) -> Output:
    if isinstance(source, int):
        source, destination = [source], [destination]
    target = {d % rank(x): s % rank(x) for s, d in zip(source, destination, strict=True)}
    others = iter([dim for dim in range(rank(x)) if dim not in target.values()])
    return permuted(b, x, [target[place] if place in target else next(others) for place in range(rank(x))])


@lowers(aten.expand.default, aten.broadcast_to.default)
def expand(b: Builder, x: Output, size: list[Size], *_: Any) -> Output:
    sizes = _kept(b, x, size)
    return x if sizes is None else repeated(b, x, sizes)


def repeated(b: Builder, x: Output, sizes: Sequence[Size]) -> Output:
    """Broadcast x to ``sizes``. In a dimension with size 1 in ``sizes``, x keeps its own size."""
    return op.broadcast(x, b.numbers(sizes), broadcast_spec="BIDIRECTIONAL").output(0)


def _kept(b: Builder, x: Output, size: Sequence[Size]) -> list[Size] | None:
    """Return the sizes for ``repeated``, with 1 for each dimension that keeps its size; None if all dimensions do."""
    old, new = b.call.fake("self").shape, b.result.shape
    more = len(new) - len(old)
    same = [place >= more and str(old[place - more]) == str(symbol) for place, symbol in enumerate(new)]
    if all(same):
        return None
    return [1 if same[place] else size[place] for place in range(len(new))]


@lowers(aten.expand_as.default)
def expand_as(b: Builder, x: Output, other: Output) -> Output:
    return expand(b, x, [b.size(other, dim) for dim in range(rank(other))])


@lowers(aten.cat.default, aten.concat.default, aten.concatenate.default)
def cat(b: Builder, tensors: list[Output], dim: int = 0) -> Output:
    fakes = b.call.fake("tensors")
    # torch skips empty tensors of one dimension, whatever the others' rank.
    legacy = [tensor.dim() == 1 and fixed_size(tensor.shape[0]) == 0 for tensor in fakes]
    parts = [
        b.cast(tensor, b.kind)
        for tensor, empty in zip(tensors, legacy, strict=True)
        if not (empty and b.result.dim() > 1)
    ]
    if len(parts) == 1:
        return parts[0]
    return op.concat(parts, dim % rank(parts[0])).output(0)


@lowers(aten.stack.default)
def stack(b: Builder, tensors: list[Output], dim: int = 0) -> Output:
    place = dim % b.result.dim()
    parts = [op.unsqueeze(b.cast(tensor, b.kind), b.axes([place])) for tensor in tensors]
    return (parts[0] if len(parts) == 1 else op.concat(parts, place)).output(0)


@lowers(aten.repeat.default, aten.tile.default)
def repeat(b: Builder, x: Output, repeats: list[Size]) -> Output:
    x = leading(b, x, b.result.dim())
    times = [1] * (rank(x) - len(repeats)) + list(repeats)
    if all(isinstance(count, int) and count == 1 for count in times):
        return x
    return op.tile(x, b.numbers(times)).output(0)


@lowers(aten.repeat_interleave.self_int)
def repeat_interleave(b: Builder, x: Output, repeats: Size, dim: int | None = None, *_: Any) -> Output:
    if dim is None:
        x, dim = op.reshape(x, b.axes([-1]), False).output(0), 0
    place = dim % rank(x)
    wide = op.unsqueeze(x, b.axes([place + 1])).output(0)
    times: list[Size] = [1] * rank(wide)
    times[place + 1] = repeats
    spread = repeated(b, wide, times)
    sizes = [b.size(x, axis) for axis in range(rank(x))]
    sizes[place] = times_of(b, sizes[place], repeats)
    return op.reshape(spread, b.numbers(sizes), False).output(0)


def times_of(b: Builder, size: Size, by: Size) -> Size:
    if isinstance(size, int) and isinstance(by, int):
        return size * by
    return op.multiply(b.cast(size, I64), b.cast(by, I64)).output(0)


@lowers(aten.flip.default)
def flip(b: Builder, x: Output, dims: list[int]) -> Output:
    for dim in dims:
        if rank(x):
            x = op.slice(x, b.axes([-1]), b.axes([-(2**31)]), b.axes([-1]), b.axes([dim % rank(x)])).output(0)
    return x


@lowers(aten.roll.default)
def roll(b: Builder, x: Output, shifts: list[Size], dims: Sequence[int] = ()) -> Output:
    flat = not dims
    original = x
    if flat:
        x, dims = op.reshape(x, b.axes([-1]), False).output(0), [0]
    x = op.roll(x, b.numbers(shifts), b.axes([dim % rank(x) for dim in dims])).output(0)
    return op.reshape(x, op.shape_of(original, "i64"), False).output(0) if flat else x


lowers(aten.pixel_shuffle.default)(lambda b, x, factor: op.depth_to_space(x, "depth_first", factor))
lowers(aten.pixel_unshuffle.default)(lambda b, x, factor: op.space_to_depth(x, "depth_first", factor))
