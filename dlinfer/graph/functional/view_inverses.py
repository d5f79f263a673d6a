"""Writing through a view, as values: the content of the whole after one part of it is replaced.

``x[:, 2:4].copy_(y)`` leaves ``x`` as ``slice_scatter(x, y, 1, 2, 4)``. Each view op that LLM code writes through has
such an inverse here; the others raise NotAFunctionError.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dlinfer.errors import NotAFunctionError
from dlinfer.graph.ir.dialect import arguments, fake, overload
from dlinfer.graph.ir.layout import inverse_order
from dlinfer.graph.torch_private.symbols import fixed_size

aten = torch.ops.aten

Emit = Callable[..., fx.Node]
"""emit(op, args, value): a new node of the function; ``value`` is the fake that says what it gives."""


def written_through(
    emit: Emit,
    sizes: Callable[[fx.Node], list[Any]],
    view: fx.Node,
    index: int | None,
    whole: fx.Node,
    part: object,
) -> fx.Node:
    """The node of the whole's new content. Raises NotAFunctionError for views that have no such inverse.

    view: the view op of the old graph, of one tensor; index: which of its results, where it gives several.
    whole: the whole's present value, part: the part's new one; both in the function. sizes(old node): its sizes there.
    """
    op = overload(view)
    name = op._schema.name.removeprefix("aten::") if op is not None else str(view.target)
    if name not in (_INVERSES if index is None else _PARTS):
        raise NotAFunctionError(node=view.name, reason=f"a write through a view by {op or name}")
    value = fake(view.all_input_nodes[0])
    if index is not None:
        return _PARTS[name](emit, view, index, whole, part, value)
    return _INVERSES[name](emit, sizes, view, whole, part, value)


def _reshaped(emit: Emit, sizes: Any, view: fx.Node, whole: fx.Node, part: Any, value: Any) -> fx.Node:
    return emit(aten.reshape.default, (part, sizes(view.args[0])), value)


def _permuted(emit: Emit, sizes: Any, view: fx.Node, whole: fx.Node, part: Any, value: Any) -> fx.Node:
    rank = value.dim()
    given = arguments(view)
    order = [int(dim) % rank for dim in given["dims"]]
    return emit(aten.permute.default, (part, inverse_order(order)), value)


def _transposed(
    emit: Emit, sizes: object, view: fx.Node, whole: fx.Node, part: object, value: object
) -> fx.Node:
    _, one, other = arguments(view).values()  # swapaxes calls them axes
    return emit(aten.transpose.int, (part, one, other), value)


def _turned(emit: Emit, sizes: Any, view: fx.Node, whole: fx.Node, part: Any, value: Any) -> fx.Node:
    if value.dim() < 2:
        return part
    return emit(aten.transpose.int, (part, 0, 1), value)


def _sliced(emit: Emit, sizes: object, view: fx.Node, whole: fx.Node, part: object, value: object) -> fx.Node:
    given = arguments(view)
    where = tuple(given[name] for name in ("dim", "start", "end", "step"))
    return emit(aten.slice_scatter.default, (whole, part, *where), value)


def _selected(
    emit: Emit, sizes: object, view: fx.Node, whole: fx.Node, part: object, value: object
) -> fx.Node:
    given = arguments(view)
    return emit(aten.select_scatter.default, (whole, part, given["dim"], given["index"]), value)


def _narrowed(
    emit: Emit, sizes: object, view: fx.Node, whole: fx.Node, part: object, value: object
) -> fx.Node:
    given = arguments(view)
    start, length = given["start"], given["length"]
    if isinstance(start, fx.Node) or isinstance(length, fx.Node):
        end = emit(operator.add, (start, length), _number(start) + _number(length))
    else:
        end = start + length
    return emit(aten.slice_scatter.default, (whole, part, given["dim"], start, end, 1), value)


def _whole(emit: Emit, sizes: Any, view: fx.Node, whole: fx.Node, part: Any, value: Any) -> fx.Node:
    return part


def _number(value: object) -> Any:
    return fake(value) if isinstance(value, fx.Node) else value


def _unbound(emit: Emit, view: fx.Node, index: int, whole: fx.Node, part: object, value: object) -> fx.Node:
    return emit(aten.select_scatter.default, (whole, part, arguments(view)["dim"], index), value)


def _split(emit: Emit, view: fx.Node, index: int, whole: fx.Node, part: object, value: object) -> fx.Node:
    """A part of split or chunk begins where the parts before it end."""
    dim = arguments(view)["dim"]
    start = 0
    for piece in fake(view)[:index]:
        start += _fixed(view, piece.shape[dim])
    end = start + _fixed(view, fake(view)[index].shape[dim])
    return emit(aten.slice_scatter.default, (whole, part, dim, start, end, 1), value)


def _fixed(view: fx.Node, size: object) -> int:
    number = fixed_size(size)
    if number is None:
        raise NotAFunctionError(
            node=view.name, reason=f"a write into one part of {overload(view)} of unknown size"
        )
    return number


_INVERSES: dict[str, Callable[..., fx.Node]] = {
    **dict.fromkeys(
        (
            "view",
            "reshape",
            "_unsafe_view",
            "unsqueeze",
            "squeeze",
            "flatten",
            "unflatten",
            "view_as",
            "reshape_as",
        ),
        _reshaped,
    ),
    "permute": _permuted,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transposed),
    **dict.fromkeys(("t", "numpy_T"), _turned),
    "slice": _sliced,
    "select": _selected,
    "narrow": _narrowed,
    **dict.fromkeys(("alias", "detach", "lift_fresh"), _whole),
}
_PARTS: dict[str, Callable[..., fx.Node]] = {
    "unbind": _unbound,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), _split),
}
