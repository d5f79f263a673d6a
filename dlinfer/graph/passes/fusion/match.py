"""Small questions that fusion rules ask while they walk a graph: what a node calls, on what, seen through what.

Nothing here changes a graph, and a question that cannot be answered for sure (a symbolic size that may or may not
equal another) is answered no: a rule that does not fire costs speed, one that fires wrongly costs results.
"""

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import fx

from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.ir.layout import same_size

aten = torch.ops.aten

ADD = (aten.add.Tensor, aten.add.Scalar)
MUL = (aten.mul.Tensor, aten.mul.Scalar)
CASTS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
    aten._to_copy.default,
)
LAST = torch.iinfo(torch.int64).max
"""How a slice says "to the end"."""


def calls(value: Any, *ops: Any) -> TypeGuard[fx.Node]:
    """Whether an argument is a node that calls one of these overloads."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in ops


def is_tensor(value: Any) -> TypeGuard[fx.Node]:
    """Whether an argument is a node whose result is one tensor."""
    return isinstance(value, fx.Node) and isinstance(fake(value), torch.Tensor)


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of a node's tensor."""
    return fake(node).dtype


def rank_of(node: fx.Node) -> int:
    """The number of dimensions of a node's tensor."""
    return fake(node).dim()


def only_user(node: fx.Node) -> fx.Node | None:
    """The one node that uses a node; None when there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def operands(node: Any, *ops: Any) -> Iterator[tuple[Any, Any]]:
    """Both orders of the two arguments of a commutative op; none when ``node`` calls none of ``ops``.

    An addition with ``alpha`` is no plain addition and gives none either.
    """
    if not calls(node, *ops) or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return
    first, second = node.args
    yield first, second
    if first is not second:
        yield second, first


def scalar_operand(node: Any, *ops: Any) -> tuple[fx.Node, float] | None:
    """(tensor, number) of a commutative op of a tensor and a Python number, in either order."""
    for tensor, number in operands(node, *ops):
        if is_tensor(tensor) and is_number(number):
            return tensor, number
    return None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether an argument is a plain Python number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_square(node: Any) -> fx.Node | None:
    """x, when ``node`` is x squared: x ** 2, x.square() or x * x."""
    if calls(node, aten.pow.Tensor_Scalar) and node.args[1] == 2:
        return _node(node.args[0])
    if calls(node, aten.square.default):
        return _node(node.args[0])
    if calls(node, aten.mul.Tensor) and node.args[0] is node.args[1]:
        return _node(node.args[0])
    return None


def cast_source(node: Any) -> fx.Node | None:
    """What a cast casts; None when ``node`` is no cast, or one to another device."""
    if not calls(node, *CASTS):
        return None
    source = node.args[0]
    if not is_tensor(source) or not is_tensor(node) or fake(source).device != fake(node).device:
        return None
    return source


def widened_from(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """(source, casts): the tensor that a node has the values of, exactly, and the casts on the way down to it.

    Only casts of floats to the same or a wider type are seen through: these lose nothing.
    """
    casts: list[fx.Node] = []
    while (source := cast_source(node)) is not None and _is_exact(dtype_of(source), dtype_of(node)):
        casts.append(node)
        node = source
    return node, tuple(casts)


def same_shape(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes' tensors certainly have one shape."""
    a, b = fake(one).shape, fake(other).shape
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def is_last_dim(dim: Any, rank: int) -> bool:
    """Whether a ``dim`` argument, an int or a list of one, names the last of ``rank`` dimensions."""
    if isinstance(dim, (list, tuple)):
        if len(dim) != 1:
            return False
        dim = dim[0]
    return isinstance(dim, int) and dim in (-1, rank - 1)


def slice_of(node: Any) -> tuple[fx.Node, int, Any, Any, int] | None:
    """(source, dim, start, end, step) of a slice, dim counted from 0; end is ``LAST`` for "to the end"."""
    if not calls(node, aten.slice.Tensor) or not is_tensor(node.args[0]):
        return None
    source = node.args[0]
    dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    if not isinstance(dim, int) or not isinstance(step, int):
        return None
    dim %= rank_of(source)
    if end is None or (isinstance(end, int) and same_size(end, fake(source).shape[dim])):
        end = LAST
    return source, dim, 0 if start is None else start, end, step


def is_whole_slice(node: Any) -> bool:
    """Whether a slice takes all of its source: what ``x[:, None]`` leaves behind for the first dimension."""
    cut = slice_of(node)
    return cut is not None and cut[2] == 0 and cut[3] == LAST and cut[4] == 1


def skip_whole_slices(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """(source, slices): a node without the slices that take everything."""
    skipped: list[fx.Node] = []
    while is_whole_slice(node):
        skipped.append(node)
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node, tuple(skipped)


def _node(value: Any) -> fx.Node | None:
    return value if is_tensor(value) else None


def _is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    return source.is_floating_point and (source is target or target in _WIDER.get(source, ()))


_WIDER = {
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
