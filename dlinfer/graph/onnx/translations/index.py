"""Writes by index as values."""

from typing import Any

import torch

from dlinfer.graph.onnx.translations.writing import Untranslated, opset, rank, shape_of, sizes

_aten = torch.ops.aten


def table() -> dict[Any, Any]:
    """Translations by op."""
    return {_aten.index_copy.default: index_copy}


def index_copy(self: Any, dim: int, index: Any, source: Any) -> Any:
    """Rows of ``source`` in the places that ``index`` names along ``dim``.

    ScatterND, which copies whole rows, and whose result may lie in the memory of its input.
    """
    op = opset()
    if rank(self) == 0:
        raise Untranslated("index_copy into a tensor without dimensions")
    axis = dim % rank(self)
    leading = sizes(self, 0, axis)
    rows = op.Reshape(op.Cast(index, to=7), [-1])
    if not leading:
        return op.ScatterND(self, op.Unsqueeze(rows, [-1]), source)
    grid = shape_of([*leading, (source, axis)])
    places = []
    for position, one in enumerate(leading):
        count = op.Squeeze(shape_of([one]), [0])
        line = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
        places.append(_spread(line, position, axis + 1, grid))
    places.append(_spread(rows, axis, axis + 1, grid))
    return op.ScatterND(self, op.Concat(*places, axis=-1), source)


def _spread(line: Any, position: int, dims: int, grid: Any) -> Any:
    """A line of indices along one dimension of a grid, with a last dimension of one."""
    op = opset()
    shape = [-1 if dim == position else 1 for dim in range(dims)]
    return op.Unsqueeze(op.Expand(op.Reshape(line, shape), grid), [-1])
