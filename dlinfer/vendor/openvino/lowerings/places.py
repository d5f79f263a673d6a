"""Checks of index tensors: if an index is out of range, torch runs the call, and raises.

For an index out of range OpenVINO's Gather reads zeros, its one-hot gives a row of zeros, its scatters raise an unclear
error, and several combined indices reach another row. A constant index is checked when the model is built. An input of
the model that indexes an input or a fixed size is checked before each call. Any other index is checked by the model
itself: for an index out of range it uses place 0 and reports a fault (``Builder.fault``), so that the model's results
are dropped.
"""

from typing import Any

import numpy
import openvino as ov
import openvino.opset16 as op
from openvino import Output

from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.vendor.openvino.builder import INDEX, Builder, LoweringError

I64 = ov.Type.i64
_KEEPS_VALUES = ("Convert", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Broadcast")
"""OpenVINO's ops whose results are elements of their first argument."""


def inside(b: Builder, index: Output, size: Any, shown: Any, negative: bool) -> Output:
    """Return an index as i64, counted from the start, with a check that it is in 0..size-1.

    size: the size of the indexed dimension as a value of the model.
    shown: the same size of the fake tensor.
    negative: whether torch's op counts negative indices from the end; otherwise it raises for them."""
    fixed = fixed_size(shown)
    if fixed is not None and _known_inside(index, fixed, negative):
        return b.cast(index, I64)
    node = index.get_node()
    limit = fixed if fixed is not None else _input_size(size)
    if limit is not None and node.get_type_name() == "Parameter":
        b.limits[node.get_friendly_name(), str(shown), negative] = limit
        return _counted(b, index, size) if negative else b.cast(index, I64)
    key = (node.get_friendly_name(), index.get_index(), str(shown), negative)
    if key not in b.places:
        b.places[key] = _looked_at(b, index, size, negative)
    return b.places[key]


def inside_dim(b: Builder, x: Output, dim: int, index: Output, negative: bool) -> Output:
    """Return an index into dimension ``dim`` of x, the call's ``self``, as ``inside`` does."""
    return inside(b, index, b.size(x, dim), b.call.fake("self").shape[dim], negative)


def _input_size(size: Any) -> tuple[str, int] | None:
    """If ``size`` is a size of an input of the model, return the input's name and the dimension; else None."""
    gather = size.get_node()
    if gather.get_type_name() != "Gather":
        return None
    shape, dim = (gather.input_value(place).get_node() for place in (0, 1))
    if shape.get_type_name() != "ShapeOf" or dim.get_type_name() != "Constant":
        return None
    owner = shape.input_value(0).get_node()
    is_input = owner.get_type_name() == "Parameter"
    return (owner.get_friendly_name(), int(dim.data)) if is_input else None


def _looked_at(b: Builder, index: Output, size: Any, negative: bool) -> Output:
    zero, size = b.scalar(0, I64), b.cast(size, I64)
    counted = _counted(b, index, size) if negative else b.cast(index, I64)
    # By a difference, since integers compare in float32. It overflows only for an index far out of range.
    outside = op.logical_or(
        op.less(counted, zero), op.logical_not(op.less(op.subtract(counted, size), zero))
    ).output(0)
    b.fault(outside, INDEX)
    return op.select(outside, zero, counted).output(0)


def _counted(b: Builder, index: Output, size: Any) -> Output:
    """Return indices counted from the start: ``size`` is added to those below 0."""
    index = b.cast(index, I64)
    return op.select(op.less(index, b.scalar(0, I64)), op.add(index, b.cast(size, I64)), index).output(0)


def _known_inside(index: Output, size: int, negative: bool) -> bool:
    """Return whether an index needs no check: it is a constant, or a sort's index, in range and counted from the start.

    Raises LoweringError for a constant that is out of range."""
    node = index.get_node()
    if node.get_type_name() == "Constant":
        values = numpy.asarray(node.data)
        low = -size if negative else 0
        if values.size and (values.min() < low or values.max() >= size):
            raise LoweringError(f"an index outside of {low}..{size - 1}")
        return not values.size or bool(values.min() >= 0)
    while node.get_type_name() in _KEEPS_VALUES:
        index = node.input_value(0)
        node = index.get_node()
    if node.get_type_name() != "TopK" or index.get_index() != 1:
        return False
    sorted_ = node.input_value(0).get_partial_shape()[node.get_attributes()["axis"]]
    return sorted_.is_static and sorted_.get_length() <= size
