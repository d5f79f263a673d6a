"""Reading by index. Some of torch's ops count negative indices from the end; other ops raise for negative indices."""

from collections.abc import Sequence
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output
from torch import Tensor

from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.vendor.openvino.builder import Builder, Size
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.lowerings.places import inside, inside_dim
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import Call, lowers

aten = torch.ops.aten
I64 = ov.Type.i64


@lowers(aten.embedding.default)
def embedding(b: Builder, weight: Output, indices: Output, *_: Any) -> Output:
    rows = inside(b, indices, b.size(weight, 0), b.call.fake("weight").shape[0], negative=False)
    return op.gather(weight, rows, b.scalar(0, I64)).output(0)


@lowers(aten.index_select.default)
def index_select(b: Builder, x: Output, dim: int, index: Output) -> Output:
    if rank(x) == 0:
        return x
    place = dim % rank(x)
    index = inside_dim(b, x, place, index, negative=False)
    flat = op.reshape(index, b.axes([-1]), False)
    return op.gather(x, flat, b.scalar(place, I64)).output(0)


def _first(b: Builder, x: Output, axis: int, number: Size) -> Output:
    """Return the first ``number`` elements of x along ``axis``, by StridedSlice.

    OpenVINO wrongly drops a Slice before GatherElements if sizes vary."""
    ends = [*[0] * axis, number]
    kept = [1] * axis + [0]
    return op.strided_slice(
        x, b.axes([0] * len(ends)), b.numbers(ends), b.axes([1] * len(ends)), kept, kept
    ).output(0)


@lowers(aten.gather.default)
def gather(b: Builder, x: Output, dim: int, index: Output, sparse_grad: bool = False) -> Output:
    """Return elements of x by index along ``dim``.

    In the other dimensions, x is first cut to the sizes of ``index``.
    """
    if rank(x) == 0:
        return op.broadcast(x, op.shape_of(index, "i64")).output(0) if rank(index) else x
    place = dim % rank(x)
    index = inside_dim(b, x, place, index, negative=False)
    fakes = b.call.fake("self").shape, b.call.fake("index").shape
    for axis, (mine, other) in enumerate(zip(*fakes, strict=True)):
        if axis != place and str(mine) != str(other):
            x = _first(b, x, axis, b.size(index, axis))
    return op.gather_elements(x, index, place).output(0)


@lowers(aten.take.default)
def take(b: Builder, x: Output, index: Output) -> Output:
    flat = op.reshape(x, b.axes([-1]), False).output(0)
    index = inside(b, index, b.size(flat, 0), b.call.fake("self").numel(), negative=True)
    return op.gather(flat, index, b.scalar(0, I64)).output(0)


def no_masks(call: Call) -> str | None:
    """Return a reason to refuse an index that is a bool mask; None if there is no mask.

    The number of elements that a mask selects depends on the data.
    """
    for index in call.fake("indices"):
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            return "an index is a mask"
    return None


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor, refuses=no_masks)
def index(b: Builder, x: Output, indices: Sequence[Output | None]) -> Output:
    indexed = [(dim, tensor) for dim, tensor in enumerate(indices) if tensor is not None]
    if len(indexed) == 1:
        dim, tensor = indexed[0]
        place = inside_dim(b, x, dim, tensor, negative=True)
        return op.gather(x, place, b.scalar(dim, I64)).output(0)
    _, flat, places, spread = index_parts(b, x, indexed)
    gathered = op.gather(flat, places, b.scalar(0, I64)).output(0)
    return _in_place(b, gathered, indexed, spread)


def index_parts(
    b: Builder, x: Output, indexed: Sequence[tuple[int, Output]]
) -> tuple[list[int], Output, Output, int]:
    """Combine several indices into one index of a single dimension, which joins all the indexed dimensions.

    Returns four values: x's dimensions, the indexed ones first; x in this order, its indexed dimensions flattened to
    one; the combined index, for that dimension; the rank of the combined index."""
    dims = [dim for dim, _ in indexed]
    order = [*dims, *(dim for dim in range(rank(x)) if dim not in dims)]
    moved = op.transpose(x, b.axes(order)).output(0) if order != sorted(order) else x
    shape = op.shape_of(x, "i64")
    places: Output | None = None
    for dim, index in indexed:
        place = inside_dim(b, x, dim, index, negative=True)
        size = b.cast(b.size(x, dim), I64)
        places = place if places is None else op.add(op.multiply(places, size), place).output(0)
    assert places is not None
    rest = op.gather(shape, b.axes(order[len(dims) :]), b.scalar(0, I64)) if len(order) > len(dims) else None
    first = b.axes([-1]) if rest is None else op.concat([_product(b, shape, dims), rest], 0)
    return order, op.reshape(moved, first, False).output(0), places, rank(places)


def _product(b: Builder, shape: Any, dims: Sequence[int]) -> Output:
    sizes = op.gather(shape, b.axes(dims), b.scalar(0, I64))
    return op.reduce_prod(sizes, b.axes([0]), True).output(0)


def _in_place(b: Builder, gathered: Output, indexed: Sequence[tuple[int, Output]], spread: int) -> Output:
    """Move the gathered dimensions to the place of the indexed dimensions if these are neighbours, as torch does.

    gathered: the result so far, with the gathered dimensions first.
    indexed: pairs of dimension and index.
    spread: the number of gathered dimensions."""
    dims = [dim for dim, _ in indexed]
    first = dims[0]
    if dims != list(range(first, first + len(dims))) or first == 0:
        return gathered
    total = rank(gathered)
    moved = [*range(spread, spread + first), *range(spread), *range(spread + first, total)]
    return op.transpose(gathered, b.axes(moved)).output(0)


def _same_sizes(call: Call) -> str | None:
    dim = call.fake("dim")
    if dim is None:
        return None
    mine, other = list(call.fake("self").shape), list(call.fake("indices").shape)
    if fixed_size(mine[dim]) == 0:
        return "an index selects from a dimension of size 0"
    mine[dim] = other[dim]
    return None if list(map(str, mine)) == list(map(str, other)) else "an index broadcasts"


@lowers(aten.take_along_dim.default, refuses=_same_sizes)
def take_along_dim(b: Builder, x: Output, index: Output, dim: int | None = None) -> Output:
    """Return elements by index along ``dim``, where indices wrap around.

    Without ``dim`` x and index are flat, and torch raises for an index out of range.
    """
    if dim is not None:
        wrapped = integers.remainder(b, b.cast(index, I64), b.size(x, dim))
        return op.gather_elements(x, wrapped, dim % rank(x)).output(0)
    x, index = (op.reshape(tensor, b.axes([-1]), False).output(0) for tensor in (x, index))
    index = inside(b, index, b.size(x, 0), b.call.fake("self").numel(), negative=False)
    return op.gather_elements(x, index, 0).output(0)


@lowers(aten.bucketize.Tensor)
def bucketize(
    b: Builder, x: Output, boundaries: Output, out_int32: bool = False, right: bool = False
) -> Output:
    kind = "i32" if b.kind == ov.Type.i32 else "i64"
    # torch's ``right`` names the side of the boundary, OpenVINO's the closed side of the interval.
    return op.bucketize(x, boundaries, kind, not right).output(0)
