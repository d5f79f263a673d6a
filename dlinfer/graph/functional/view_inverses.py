"""Turn a write through a view into a value: the base tensor's new content, with one part replaced.

After ``x[:, 2:4].copy_(y)``, the content of ``x`` is ``slice_scatter(x, y, 1, 2, 4)``. This module has such an inverse
for each view op that LLM code writes through. A write through another view op raises NotAFunctionError.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from dlinfer.errors import NotAFunctionError
from dlinfer.graph.ir.dialect import arguments, fake, schema_name, tensor_of
from dlinfer.graph.ir.layout import inverse_order, is_static
from dlinfer.graph.torch_private.dispatcher import Op
from dlinfer.graph.torch_private.symbols import fixed_size

aten = torch.ops.aten


@dataclass(frozen=True)
class ViewWrite:
    """A write through a view. The old graph is the region's graph, and the new graph is the functionalized one.

    view: the view op, a node of the old graph.
    index: the index of the written result, if the view op has several results; else None.
    base: the base tensor's present value, a node of the new graph.
    part: the written part's new value, a node of the new graph.
    new_node: a function that inserts a call (op, args, fake result) into the new graph.
    sizes: a function that returns the sizes of an old node as arguments for the new graph.
    """

    view: fx.Node
    index: int | None
    base: fx.Node
    part: fx.Node
    new_node: Callable[[Callable[..., object], tuple[Argument, ...], object], fx.Node]
    sizes: Callable[[fx.Node], list[Argument]]

    def new_base(self) -> fx.Node:
        """Return the base tensor's new value. Raises NotAFunctionError for a view that has no inverse."""
        name = schema_name(self.view).removeprefix("aten::")
        inverse = (_INVERSES if self.index is None else _INVERSES_OF_PARTS).get(name)
        if inverse is None:
            reason = f"the graph writes through a view by {self.view.target}"
            raise NotAFunctionError(node=self.view.name, reason=reason)
        return inverse(self)

    def result(self, op: Op, *args: Argument) -> fx.Node:
        return self.new_node(op, args, fake(self.view.all_input_nodes[0]))

    def scattered(self, op: Op, *bounds: Argument) -> fx.Node:
        """Insert and return a call of a scatter op, which writes ``part`` into the base.

        bounds: the op's arguments after the base and the part, such as dim, start and end.
        """
        return self.result(op, self.base, self.part, *bounds)

    @property
    def operands(self) -> list[Any]:
        """The view op's arguments after its tensor."""
        return [*arguments(self.view).values()][1:]


def _reshape(write: ViewWrite) -> fx.Node:
    return write.result(aten.reshape.default, write.part, write.sizes(write.view.all_input_nodes[0]))


def _permute(write: ViewWrite) -> fx.Node:
    (dims,) = write.operands
    return write.result(aten.permute.default, write.part, inverse_order([dim % len(dims) for dim in dims]))


def _reversed(write: ViewWrite) -> fx.Node:
    dims = range(tensor_of(write.view).dim())
    return write.result(aten.permute.default, write.part, [*reversed(dims)])


def _narrow(write: ViewWrite) -> fx.Node:
    dim, start, length = write.operands
    first, size = (fake(bound) if isinstance(bound, fx.Node) else bound for bound in (start, length))
    end = first + size
    if not is_static(end):
        end = write.new_node(operator.add, (start, length), end)
    return write.scattered(aten.slice_scatter.default, dim, start, end, 1)


def _split(write: ViewWrite) -> fx.Node:
    """Return the new base after a write to one result of split or chunk."""
    dim = arguments(write.view)["dim"]
    *before, size = [fixed_size(part.shape[dim]) for part in fake(write.view)[: (write.index or 0) + 1]]
    starts = [number for number in before if number is not None]
    if size is None or len(starts) < len(before):
        reason = f"the graph writes into a part of {write.view.target} with unknown size"
        raise NotAFunctionError(node=write.view.name, reason=reason)
    start = sum(starts)
    return write.scattered(aten.slice_scatter.default, dim, start, start + size, 1)


_RESHAPES = "view reshape _unsafe_view unsqueeze squeeze flatten unflatten view_as reshape_as".split()
_INVERSES: dict[str, Callable[[ViewWrite], fx.Node]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(("alias", "detach", "lift_fresh"), lambda write: write.part),
    **dict.fromkeys(
        ("transpose", "swapaxes", "swapdims"),
        lambda write: write.result(aten.transpose.int, write.part, *write.operands),
    ),
    "permute": _permute,
    **dict.fromkeys(("t", "numpy_T"), _reversed),
    "slice": lambda write: write.scattered(aten.slice_scatter.default, *write.operands),
    "select": lambda write: write.scattered(aten.select_scatter.default, *write.operands),
    "narrow": _narrow,
}
_INVERSES_OF_PARTS: dict[str, Callable[[ViewWrite], fx.Node]] = {
    "unbind": lambda write: write.scattered(aten.select_scatter.default, *write.operands, write.index),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), _split),
}
