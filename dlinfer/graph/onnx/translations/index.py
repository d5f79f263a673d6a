"""Translate functional writes (copy, index_copy) and reshapes."""

from collections.abc import Sequence

import torch

from dlinfer.graph.onnx.translations.writing import (
    Untranslated,
    Value,
    number,
    op,
    rank,
    shape_of,
    size,
    sizes,
    translates,
)

_aten = torch.ops.aten


@translates(_aten.copy.default)
def copy(self: Value, src: Value, non_blocking: bool = False) -> Value:
    """Return ``src`` in the dtype and sizes of ``self``. torch.onnx's translation would keep the sizes of ``src``."""
    if isinstance(src, (bool, int, float)):
        return op.Expand(number(src, self), op.Shape(self))
    cast = op.CastLike(src, self)
    own, other = ([size(value, dim) for dim in range(rank(value))] for value in (self, src))
    return cast if own == other and None not in own else op.Expand(cast, op.Shape(self))


@translates(_aten.index_copy.default)
def index_copy(self: Value, dim: int, index: Value, source: Value) -> Value:
    """Return ``self`` with the rows of ``source`` in the places that ``index`` names along ``dim``.

    The translation is a ScatterND, which copies whole rows. A runtime may compute the result in the memory of ``self``.
    """
    if rank(self) == 0:
        raise Untranslated("index_copy writes into a 0-d tensor")
    axis = dim % rank(self)
    leading = sizes(self, 0, axis)
    rows = op.Reshape(op.Cast(index, to=7), [-1])
    if not leading:
        return op.ScatterND(self, op.Unsqueeze(rows, [-1]), source)
    grid = shape_of([*leading, (source, axis)])
    places: list[Value] = []
    for position, dimension in enumerate(leading):
        count = op.Squeeze(shape_of([dimension]), [0])
        line = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
        places.append(spread(line, position, axis + 1, grid))
    places.append(spread(rows, axis, axis + 1, grid))
    return op.ScatterND(self, op.Concat(*places, axis=-1), source)


@translates(_aten.squeeze.dim, _aten.squeeze.dims)
def squeeze(self: Value, dim: int | Sequence[int]) -> Value:
    """Drop each of the dimensions ``dim`` whose size is 1."""
    places = [dim] if isinstance(dim, int) else dim
    dropped = [place for place in places if rank(self) and size(self, place) == 1]
    return op.Squeeze(self, op.Constant(value_ints=dropped)) if dropped else op.Identity(self)


@translates(_aten.reshape.default)
def reshape(x: Value, shape: Sequence[Value]) -> Value:
    """Return x with new sizes.

    shape: numbers, or values of the graph. A size of 0 means 0, while ONNX's default for 0 is the size of x.
    """
    fixed = 0 not in shape and all(isinstance(size, int) for size in shape)
    return op.Reshape(x, shape_of(shape), allowzero=int(not fixed))


def spread(line: Value, position: int, dims: int, grid: Value) -> Value:
    """Expand a vector of indices to the shape ``grid``, and add a last dimension of size 1.

    position: the dimension of the grid along which the indices change. dims: the grid's number of dimensions.
    """
    shape = [-1 if dim == position else 1 for dim in range(dims)]
    return op.Unsqueeze(op.Expand(op.Reshape(line, shape), grid), [-1])
