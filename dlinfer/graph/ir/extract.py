"""Extracts nodes of a graph into a subgraph."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dlinfer.errors import CaptureError
from dlinfer.graph.ir.dialect import STATIC, fake
from dlinfer.graph.ir.program import attribute
from dlinfer.graph.torch_private.symbols import plain_symbol, symbols_of


@dataclass(frozen=True)
class Subgraph:
    """Some nodes of a graph as a module of their own.

    inputs: outer nodes, one for each placeholder. outputs: inner nodes that outer nodes read, in the order of results.
    inserted: inputs that were inserted into the outer graph: sizes of placeholders, to be read first.
    """

    graph_module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    inserted: tuple[fx.Node, ...] = ()

    @property
    def name(self) -> str:
        """The name of its module, ``region_0``."""
        return type(self.graph_module).__name__


def extract(owner: fx.GraphModule, nodes: Sequence[fx.Node], name: str) -> Subgraph:
    """Copy nodes, in their order of execution, into a subgraph."""
    inside = set(nodes)
    outputs = tuple(n for n in nodes if any(user not in inside for user in n.users))
    return extract_with_outputs(owner, nodes, outputs, name)


def extract_with_outputs(
    owner: fx.GraphModule, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], name: str
) -> Subgraph:
    """As ``extract``, with these outputs."""
    inside = set(nodes)
    parents = dict.fromkeys(p for n in nodes for p in n.all_input_nodes if p not in inside)
    before = set(owner.graph.nodes)
    parents |= dict.fromkeys(_symbol_inputs(owner, parents, nodes))
    inserted = tuple(p for p in parents if p not in before)
    constants = [p for p in parents if p.op == "get_attr"]
    inputs = tuple(p for p in parents if p.op != "get_attr")
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for parent in inputs:
        copies[parent] = graph.placeholder(parent.name)
        copies[parent].meta = {
            "val": parent.meta.get("val"),
            STATIC: parent.meta.get(STATIC, False),
            "producer": parent,
        }
    values = {}
    for parent in constants:
        values[str(parent.target)] = attribute(owner, str(parent.target))
        copies[parent] = graph.get_attr(str(parent.target))
        copies[parent].meta = dict(parent.meta)
    for node in nodes:
        if node.op == "get_attr":
            values[str(node.target)] = attribute(owner, str(node.target))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Subgraph(fx.GraphModule(values, graph, name), inputs, tuple(outputs), inserted)


def _symbol_inputs(
    owner: fx.GraphModule, parents: Iterable[fx.Node], nodes: Sequence[fx.Node]
) -> list[fx.Node]:
    """Nodes for the symbols of ``nodes`` that are neither an input nor a size of one.

    Compilers take a symbol's value from an input of the subgraph. Unbacked symbols that ``nodes`` create (``item``,
    ``nonzero``) need none.
    """
    shown = {symbol for node in parents for symbol in _shown(fake(node))}
    used: set[Any] = set()
    for node in (*parents, *nodes):
        for leaf in pytree.tree_leaves(fake(node)):
            used.update(symbols_of(leaf))
    inside = set(nodes)
    missing = sorted(used - shown, key=str)
    return [_node_of(owner, symbol) for symbol in missing if _origin(owner, symbol) not in inside]


def _origin(owner: fx.GraphModule, symbol: object) -> fx.Node:
    """The first node whose result has a symbol."""
    return next(
        node
        for node in owner.graph.nodes
        if any(symbol in symbols_of(leaf) for leaf in pytree.tree_leaves(fake(node)))
    )


def _shown(value: object) -> set[Any]:
    numbers = value.shape if isinstance(value, torch.Tensor) else [value]
    return {plain_symbol(number) for number in numbers} - {None}


def _node_of(owner: fx.GraphModule, symbol: object) -> fx.Node:
    """A node whose value is a symbol, before everything that needs it.

    An input, an input's size, or the op that creates the symbol. A ``sym_size`` of the graph may come too late. Raises
    CaptureError where there is none.
    """
    placeholders = owner.graph.find_nodes(op="placeholder")
    for node in placeholders:
        if plain_symbol(fake(node)) == symbol:
            return node
    for node in owner.graph.nodes:
        if node.meta.get(_READ_FIRST) and plain_symbol(fake(node)) == symbol:
            return node
    for node in placeholders:
        for dim, size in enumerate(fake(node).shape if isinstance(fake(node), torch.Tensor) else ()):
            if plain_symbol(size) == symbol:
                with owner.graph.inserting_after(placeholders[-1]):
                    read = owner.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                read.meta |= {"val": size, _READ_FIRST: True}
                return read
    for node in owner.graph.nodes:
        if node.op == "call_function" and plain_symbol(fake(node)) == symbol:
            return node
    raise CaptureError(
        reason=f"no input has the size {symbol} itself, only expressions of it", line=type(owner).__name__
    )


_READ_FIRST = "read_first"
"""Key in the meta of a ``sym_size`` that was inserted for a Subgraph."""
