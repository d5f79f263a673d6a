"""What a session is fed: a function's inputs, or views of its weights that lie in memory as ONNX wants them.

ONNX knows contiguous tensors only. A weight that torch keeps transposed, or one matrix of a stack, is contiguous as
some view; that view is fed, and nothing of it is copied or computed at a call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dlinfer.graph.dialect import STATIC, fake, is_view
from dlinfer.vendor.onnxruntime.experts import split_experts

View = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Feed:
    """One input of the model: the function's input of this index, or a view of it."""

    index: int
    view: View | None = None

    def of(self, inputs: Sequence[Any]) -> Any:
        """What to feed, from the function's inputs."""
        value = inputs[self.index]
        return value if self.view is None else self.view(value)


def fed(graph_module: fx.GraphModule, steady: frozenset[int]) -> tuple[fx.GraphModule, list[Feed]]:
    """(a copy of the graph that takes what is fed, the feeds of its placeholders in order).

    steady: indices of the inputs that are the same tensors at each call and not written; only they are fed as views.
    An input that nothing reads is not fed.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(graph_module.graph, copies)  # pyright: ignore[reportArgumentType]
    for old, new in copies.items():
        new.meta = dict(old.meta)
    graph.output(result)
    constants = {
        str(node.target): getattr(graph_module, str(node.target))
        for node in graph_module.graph.find_nodes(op="get_attr")
    }
    inputs = graph.find_nodes(op="placeholder")
    feeds = {node: Feed(index) for index, node in enumerate(inputs)}
    split_experts(graph, {inputs[index] for index in steady})
    for index in sorted(steady):
        _feed_views(graph, inputs[index], feeds)
    for node in list(feeds):
        if not node.users:
            graph.erase_node(node)
            del feeds[node]
    order = graph.find_nodes(op="placeholder")
    return fx.GraphModule(constants, graph, graph_module._get_name()), [feeds[node] for node in order]


def _feed_views(graph: fx.Graph, weight: fx.Node, feeds: dict[fx.Node, Feed]) -> None:
    """Feed the views of a weight that are contiguous; and where it is not so itself, it as it lies."""
    index = feeds[weight].index
    if not _is_fixed(fake(weight)):
        return
    for user in list(weight.users):
        if _is_fixed_view(user) and fake(user).is_contiguous():
            place = _placeholder(graph, weight, f"{weight.name}_{user.name}", fake(user))
            feeds[place] = Feed(index, _call(user))
            user.replace_all_uses_with(place)
            graph.erase_node(user)
    if not weight.users or fake(weight).is_contiguous():
        return
    order = _order(fake(weight))
    if order is None:
        return
    place = _placeholder(graph, weight, f"{weight.name}_as_it_lies", fake(weight).permute(order))
    feeds[place] = Feed(index, lambda value: value.permute(order))
    back = [order.index(dim) for dim in range(len(order))]
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        shown = graph.call_function(torch.ops.aten.permute.default, (place, back))
    shown.meta = {"val": fake(weight)}
    weight.replace_all_uses_with(shown)


def _placeholder(graph: fx.Graph, weight: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    with graph.inserting_after(weight):
        place = graph.placeholder(name)
    place.meta = {"val": value, STATIC: True}
    return place


def _is_fixed(value: Any) -> bool:
    """Whether a tensor's sizes and strides are numbers."""
    if not isinstance(value, torch.Tensor):
        return False
    return all(isinstance(number, int) for number in (*value.shape, *value.stride()))


def _is_fixed_view(node: fx.Node) -> bool:
    return len(node.all_input_nodes) == 1 and is_view(node) and _is_fixed(fake(node))


def _call(node: fx.Node) -> View:
    """The view that a node makes of its one argument."""
    target: Any = node.target
    args, kwargs = node.args, dict(node.kwargs)
    (source,) = node.all_input_nodes

    def view(value: torch.Tensor) -> torch.Tensor:
        return target(*(value if one is source else one for one in args), **kwargs)

    return view


def _order(value: torch.Tensor) -> list[int] | None:
    """The order of dimensions in which a tensor is contiguous; None where there is none."""
    order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), value.shape[dim] == 1))
    return order if value.permute(order).is_contiguous() else None
