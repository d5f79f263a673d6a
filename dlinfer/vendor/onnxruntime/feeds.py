"""The inputs of a session's model. They are called feeds: a function's inputs, or contiguous views of its weights.

ONNX has only contiguous tensors. A weight that torch stores transposed, or as one matrix of a stack, has a contiguous
view. The session reads this view, so a call neither copies the weight nor computes the transpose or the matrix. Packed
weights are repacked once.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.dialect import STATIC, fake, is_view, tensors_of
from dlinfer.vendor.onnxruntime.translations.experts import split_experts
from dlinfer.vendor.onnxruntime.translations.packed import PREPARED, split_packed

View = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Feed:
    """One input of the model: input ``index`` of the function.

    view: a function that makes a view of this input, which the model gets instead; None without a view.
    """

    index: int
    view: View | None = None

    def of(self, inputs: Sequence[Any]) -> Any:
        value = inputs[self.index]
        return value if self.view is None else self.view(value)


def fed(
    graph_module: fx.GraphModule, steady: frozenset[int], accuracy_level: int
) -> tuple[fx.GraphModule, list[Feed]]:
    """Return a copy of the graph that takes feeds, and the feeds in the order of the copy's placeholders.

    steady: indices of inputs that the graph does not write and that are the same tensors at each call. Only views of
        these inputs become feeds.
    accuracy_level: how products with packed weights round, see ``OrtOptions``.
    The copy lacks inputs that no node reads.
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
    split_packed(graph, {inputs[index] for index in steady}, accuracy_level)
    for index in sorted(steady):
        _feed_views(graph, inputs[index], feeds)
    for node in list(feeds):
        if not node.users:
            graph.erase_node(node)
            del feeds[node]
    order = graph.find_nodes(op="placeholder")
    return fx.GraphModule(constants, graph, graph_module._get_name()), [feeds[node] for node in order]


def _feed_views(graph: fx.Graph, weight: fx.Node, feeds: dict[fx.Node, Feed]) -> None:
    """Replace views of a weight in the graph by feeds, if the views are contiguous.

    A weight that is not contiguous becomes a feed too: a permutation of its dimensions that is contiguous.
    """
    index = feeds[weight].index
    if not _is_fixed(fake(weight)):
        return
    for node, view in list(_contiguous_views(weight)):
        place = _placeholder(graph, weight, f"{weight.name}_{node.name}", fake(node))
        feeds[place] = Feed(index, view)
        node.replace_all_uses_with(place)
        _erase_unused(graph, node)
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


def _contiguous_views(source: fx.Node, before: View | None = None) -> Iterator[tuple[fx.Node, View]]:
    """Yield pairs (node, view). On each path of views from a weight, the node is the first with a contiguous value.

    The view is a function from the weight to the node's value.
    before: the function from the weight to ``source``; None if ``source`` is the weight.
    """
    for user in source.users:
        if not _is_fixed_view(user):
            continue
        step = _call(user)
        view = step if before is None else _after(before, step)
        value = fake(user)
        if isinstance(value, torch.Tensor) and value.is_contiguous():
            yield user, view
        else:
            yield from _contiguous_views(user, view)


def _after(first: View, second: View) -> View:
    return lambda value: second(first(value))


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a view that no node reads. Then do the same for the view that it was a view of, and so on."""
    while not node.users and node.op == "call_function":
        (source,) = node.all_input_nodes
        graph.erase_node(node)
        node = source


def _placeholder(graph: fx.Graph, weight: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    with graph.inserting_after(weight):
        place = graph.placeholder(name)
    place.meta = {"val": value, STATIC: True}
    return place


def _is_fixed(value: Any) -> bool:
    """Return whether a value is a tensor whose sizes and strides are numbers."""
    if not isinstance(value, torch.Tensor):
        return False
    return all(isinstance(number, int) for number in (*value.shape, *value.stride()))


def _is_fixed_view(node: fx.Node) -> bool:
    """Return whether a node views one other node or repacks a weight, with fixed sizes.

    An item of ``split`` counts as a view.
    """
    if len(node.all_input_nodes) != 1 or not all(map(_is_fixed, tensors_of(node))):
        return False
    return node.target is operator.getitem or node.target in PREPARED or is_view(node)


def _call(node: fx.Node) -> Callable[[Any], Any]:
    """Return the node as a function of its one tensor argument."""
    target: Any = node.target
    args, kwargs = node.args, dict(node.kwargs)
    (source,) = node.all_input_nodes

    def call(value: Any) -> Any:
        return target(*(value if arg is source else arg for arg in args), **kwargs)

    return call


def _order(value: torch.Tensor) -> list[int] | None:
    """Return the permutation of dimensions that makes a tensor contiguous; None if there is no such permutation."""
    order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), value.shape[dim] == 1))
    return order if value.permute(order).is_contiguous() else None
