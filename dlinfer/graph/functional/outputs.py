"""The outputs of a region from the values that an engine computed.

A region may return an input, a view of one, or two tensors that share memory. An engine computes each memory once,
contiguous. torch repeats the region's views of it, without a copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dlinfer.errors import NotAFunctionError
from dlinfer.graph.ir.dialect import fake, storages, written_arguments
from dlinfer.graph.ir.layout import Order, dense_order, inverse_order, same_place
from dlinfer.graph.ir.program import attribute
from dlinfer.graph.torch_private.expressions import number_node
from dlinfer.graph.torch_private.symbols import plain_symbol, symbols_of


@dataclass(frozen=True)
class Results:
    """The values that an engine has to compute, and how the region's outputs follow.

    fresh: nodes that allocate results, each with the order of its dimensions in memory, None where contiguous.
    module: takes the region's inputs, then the fresh values in the order of memory, and returns the outputs.
    """

    fresh: Sequence[tuple[fx.Node, Order | None]]
    module: fx.GraphModule
    written: int = 0

    def __call__(self, inputs: Sequence[object], values: Sequence[Tensor]) -> tuple[Any, ...]:
        """values: the function's outputs, first the new contents of ``written`` inputs."""
        return self.module(*inputs, *values[self.written :])


def results_of(owner: fx.GraphModule, outputs: Sequence[object], written: int) -> Results:
    """How a region's outputs follow from its inputs and fresh memory. written: how many inputs have a new content.

    Raises NotAFunctionError.
    """
    graph = fx.Graph()
    inputs = owner.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in inputs}
    bases = list(dict.fromkeys(base for node in outputs if (base := _base(node)) is not None))
    fresh = [(base, _order(base)) for base in bases if base.op == "call_function"]
    values = [(base, order, graph.placeholder(f"value_{n}")) for n, (base, order) in enumerate(fresh)]
    for base, order, value in values:
        copies[base] = (
            value
            if order is None
            else graph.call_function(torch.ops.aten.permute.default, (value, inverse_order(order)))
        )
    replay = _Replay(graph, copies, _symbols(graph, inputs, copies))
    graph.output(tuple(replay.of(node) for node in outputs))
    constants = {str(n.target): attribute(owner, str(n.target)) for n in graph.find_nodes(op="get_attr")}
    return Results(fresh, fx.GraphModule(constants, graph, "results"), written)


def viewed(node: fx.Node) -> fx.Node | None:
    """The argument that a node's result is a view of; None where the result has memory of its own."""
    mine = storages(node)
    if node.op != "call_function" or not mine:
        return None
    return next((parent for parent in node.all_input_nodes if mine & storages(parent)), None)


def is_same(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node has the same memory, sizes and strides as another: an alias, or the result of an in-place op."""
    value, base = fake(node), fake(other)
    return isinstance(value, Tensor) and isinstance(base, Tensor) and same_place(value, base)


def _base(node: object) -> fx.Node | None:
    """The node that allocated the memory of a tensor output; None for a number."""
    if not isinstance(node, fx.Node) or not isinstance(fake(node), Tensor):
        if isinstance(node, fx.Node) and isinstance(fake(node), (list, tuple)):
            raise NotAFunctionError(node=node.name, reason="several tensors as one output")
        return None
    while (parent := viewed(node)) is not None and _is_tensor_or_parts(parent, node):
        node = parent
    return node


def _is_tensor_or_parts(parent: fx.Node, node: fx.Node) -> bool:
    """Whether to look above ``parent``: not where it is an op that returns several new tensors."""
    return isinstance(fake(parent), Tensor) or viewed(parent) is not None


def _order(base: fx.Node) -> Order | None:
    """The order of a result's dimensions in memory; None where it is contiguous.

    Raises NotAFunctionError where it has gaps or overlaps.
    """
    order = dense_order(fake(base))
    if order is None:
        raise NotAFunctionError(node=base.name, reason="its result lies in memory with gaps or overlaps")
    return None if order == tuple(range(len(order))) else order


def _symbols(
    graph: fx.Graph, inputs: Sequence[fx.Node], copies: Mapping[fx.Node, object]
) -> Callable[[Any], fx.Node]:
    """Maps a symbol to the node that reads its value from the inputs."""
    known: dict[Any, fx.Node] = {}

    def read(symbol: object) -> fx.Node:
        if symbol not in known:
            known[symbol] = _reader(graph, inputs, copies, symbol)
        return known[symbol]

    return read


def _reader(
    graph: fx.Graph, inputs: Sequence[fx.Node], copies: Mapping[fx.Node, Any], symbol: Any
) -> fx.Node:
    for node in inputs:
        value = fake(node)
        if plain_symbol(value) == symbol:
            return copies[node]
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if plain_symbol(size) == symbol:
                return graph.call_function(torch.ops.aten.sym_size.int, (copies[node], dim))
    raise NotAFunctionError(node=str(symbol), reason="a size that no input of the region shows")


class _Replay:
    """Repeats the views of a region on the values that an engine computed."""

    def __init__(self, graph: fx.Graph, copies: dict[fx.Node, Any], symbol: Callable[[Any], fx.Node]) -> None:
        self.graph, self.copies, self.symbol = graph, copies, symbol

    def of(self, node: object) -> Any:
        """The new node of an output, or of an argument of a view."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self.copies:
            self.copies[node] = self._write(node)
        return self.copies[node]

    def _write(self, node: fx.Node) -> Any:
        value = fake(node)
        if isinstance(value, (int, float, bool)) and not isinstance(value, torch.SymInt):
            return value
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            symbols = {symbol: self.symbol(symbol) for symbol in symbols_of(value)}
            return number_node(self.graph, value, symbols)
        if node.op == "get_attr":
            return self.graph.get_attr(str(node.target))
        parent = viewed(node)
        assert parent is not None, "what is no view is one of the values"
        if written_arguments(node):  # the caller's own tensor was written
            return self.of(parent)
        return self.graph.node_copy(node, self.of)
