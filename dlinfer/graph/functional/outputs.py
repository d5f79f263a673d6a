"""Make a region's outputs from the values that an engine computed.

A region may return an input, a view of an input, or two tensors that share memory. So the engine computes each tensor
that owns memory once, contiguous. torch then repeats the region's views of these tensors, without a copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from dlinfer.errors import NotAFunctionError
from dlinfer.graph.ir.dialect import fake, input_with, is_list, storages, tensor_or_none, written_arguments
from dlinfer.graph.ir.layout import Order, dense_order, inverse_order, same_place
from dlinfer.graph.torch_private.expressions import number_node
from dlinfer.graph.torch_private.symbols import symbols_of

Fresh = tuple[fx.Node, Order | None]
"""A node that allocates its result, and the order of the result's dimensions in memory (None if contiguous)."""


def results_of(owner: fx.GraphModule, outputs: Sequence[object]) -> tuple[list[Fresh], fx.GraphModule]:
    """Return the values that an engine has to compute, and a module that makes the region's outputs from them.

    The module takes the region's inputs, then the computed values. The engine computes each value contiguous, with its
    dimensions sorted by descending stride. Raises NotAFunctionError if an output cannot be made in this way.
    """
    bases = dict.fromkeys(base for node in outputs if (base := _base(node)) is not None)
    fresh = [(base, _order(base)) for base in bases if base.op == "call_function"]
    replay = _Replay(owner, fresh)
    replay.graph.output(tuple(replay.of(node) for node in outputs))
    return fresh, fx.GraphModule(owner, replay.graph, "results")


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the argument that shares memory with a node's result; None if the result has memory of its own."""
    memory = storages(node) if node.op == "call_function" else set[int]()
    return next((parent for parent in node.all_input_nodes if memory & storages(parent)), None)


def is_same(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes that share memory have equal offset, sizes, strides and dtype.

    This holds for an alias, and for the result of an in-place op.
    """
    value, base = tensor_or_none(node), tensor_or_none(other)
    return value is not None and base is not None and same_place(value, base)


def _base(node: object) -> fx.Node | None:
    """Return the node that allocated the memory of a tensor output; None for a number."""
    if not isinstance(node, fx.Node):
        return None
    if is_list(fake(node)):
        raise NotAFunctionError(node=node.name, reason="one output holds several tensors")
    if tensor_or_none(node) is None:
        return None
    # The walk up the views ends at an item of an op that returns several new tensors.
    while (above := viewed(node)) and (tensor_or_none(above) is not None or viewed(above) is not None):
        node = above
    return node


def _order(base: fx.Node) -> Order | None:
    """Return the order of a result's dimensions in memory; None if it is contiguous.

    Raises NotAFunctionError if the result has gaps or overlaps.
    """
    order = dense_order(fake(base))
    if order is None:
        raise NotAFunctionError(node=base.name, reason="its result has gaps or overlaps in memory")
    return None if order == tuple(range(len(order))) else order


class _Replay:
    """Repeats a region's views on its inputs and on the values that an engine computed."""

    def __init__(self, owner: fx.GraphModule, fresh: Sequence[Fresh]) -> None:
        self.graph = fx.Graph()
        self.inputs = owner.graph.find_nodes(op="placeholder")
        self.copies: dict[fx.Node, Any] = {node: self.graph.placeholder(node.name) for node in self.inputs}
        self.symbols: dict[object, fx.Node] = {}
        self.copies |= {base: self.graph.placeholder(f"value_{n}") for n, (base, _) in enumerate(fresh)}
        for base, order in fresh:
            if order is not None:
                args = (self.copies[base], inverse_order(order))
                self.copies[base] = self.graph.call_function(torch.ops.aten.permute.default, args)

    def of(self, node: object) -> Any:
        """Return the new graph's node for an output of the region, or for an argument of a view."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self.copies:
            self.copies[node] = self._write(node)
        return self.copies[node]

    def _write(self, node: fx.Node) -> Argument:
        value = fake(node)
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            symbols = {symbol: self._symbol(symbol) for symbol in symbols_of(value)}
            return number_node(self.graph, value, symbols)
        if node.op == "get_attr":
            return self.graph.get_attr(str(node.target))
        parent = viewed(node)
        assert parent is not None, "a node that is not a view is one of the values"
        if written_arguments(node):  # the caller's own tensor was written
            return self.of(parent)
        return self.graph.node_copy(node, self.of)

    def _symbol(self, symbol: object) -> fx.Node:
        """Return the node that reads a symbol's value from the inputs. Raises NotAFunctionError if no input has it."""
        if symbol not in self.symbols:
            source = input_with(symbol, self.inputs)
            if source is None:
                raise NotAFunctionError(node=str(symbol), reason="no input of the region has this size")
            if isinstance(source, fx.Node):
                self.symbols[symbol] = self.copies[source]
            else:
                args = (self.copies[source[0]], source[1])
                self.symbols[symbol] = self.graph.call_function(torch.ops.aten.sym_size.int, args)
        return self.symbols[symbol]
