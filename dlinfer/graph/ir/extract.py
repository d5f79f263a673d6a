"""Extract nodes of a graph into a subgraph."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from dlinfer.errors import CaptureError
from dlinfer.graph.ir.dialect import STATIC, fake, input_with, symbols_in
from dlinfer.graph.torch_private.symbols import plain_symbol

_READ_FIRST = "read_first"
"""The key in the meta of a ``sym_size`` that was inserted for a Subgraph."""


@dataclass(frozen=True)
class Subgraph:
    """Some nodes of a graph, copied into a module of their own.

    inputs: nodes of the outer graph, one for each placeholder of the module.
    outputs: nodes of the outer graph whose values the module returns, in this order.
    inserted: the inputs that are new ``sym_size`` nodes of the outer graph. They must run before all other nodes.
    """

    graph_module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    inserted: tuple[fx.Node, ...] = ()

    @property
    def name(self) -> str:
        return type(self.graph_module).__name__


def extract(
    owner: fx.GraphModule, nodes: Sequence[fx.Node], name: str, outputs: Sequence[fx.Node] | None = None
) -> Subgraph:
    """Copy ``nodes`` of ``owner`` into a subgraph. They are given in their order of execution.

    name: the subgraph's name.
    outputs: the nodes whose values the subgraph returns; by default the nodes that the rest of the graph reads.
    """
    inside = set(nodes)
    if outputs is None:
        outputs = [node for node in nodes if not inside.issuperset(node.users)]
    parents = dict.fromkeys(p for n in nodes for p in n.all_input_nodes if p not in inside)
    before = set(owner.graph.nodes)
    parents |= dict.fromkeys(_symbol_inputs(owner, parents, nodes))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for parent in parents:
        if parent.op == "get_attr":
            copies[parent] = graph.node_copy(parent)
            continue
        copies[parent] = graph.placeholder(parent.name)
        copies[parent].meta = {
            "val": fake(parent),
            STATIC: parent.meta.get(STATIC, False),
            "producer": parent,
        }
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    inputs = tuple(parent for parent in parents if parent.op != "get_attr")
    inserted = tuple(parent for parent in parents if parent not in before)
    return Subgraph(fx.GraphModule(owner, graph, name), inputs, tuple(outputs), inserted)


def _symbol_inputs(
    owner: fx.GraphModule, parents: Iterable[fx.Node], nodes: Sequence[fx.Node]
) -> list[fx.Node]:
    """Return further inputs of the subgraph, for symbols that are not the value or a size of a node in ``parents``.

    Compilers take a symbol's value from an input of the subgraph. Unbacked symbols that ``nodes`` create (``item``,
    ``nonzero``) need no input.
    """
    numbers = [number for node in parents for number in getattr(fake(node), "shape", [fake(node)])]
    used = {symbol for node in (*parents, *nodes) for symbol in symbols_in(node)}
    missing = sorted(used.difference(map(plain_symbol, numbers)), key=str)
    inside = set(nodes)
    return [_node_of(owner, symbol) for symbol in missing if _origin(owner, symbol) not in inside]


def _origin(owner: fx.GraphModule, symbol: object) -> fx.Node:
    return next(node for node in owner.graph.nodes if symbol in symbols_in(node))


def _node_of(owner: fx.GraphModule, symbol: object) -> fx.Node:
    """Return a node whose value is this symbol. The node comes before all nodes that need the symbol.

    The node is an input, a new ``sym_size`` of an input, or the op that creates the symbol. A ``sym_size`` of the
    captured graph may come too late, so a new one is inserted. Raises CaptureError if there is no such node.
    """
    placeholders = owner.graph.find_nodes(op="placeholder")
    source = input_with(symbol, placeholders)
    if isinstance(source, fx.Node):
        return source
    same = [node for node in owner.graph.nodes if plain_symbol(fake(node)) == symbol]
    if source is None:
        computed = [node for node in same if node.op == "call_function"]
        if not computed:
            reason = f"no input has the size {symbol} itself; inputs have only expressions of it"
            raise CaptureError(reason=reason, line=type(owner).__name__)
        return computed[0]
    for node in same:
        if node.meta.get(_READ_FIRST):
            return node
    with owner.graph.inserting_after(placeholders[-1]):
        read = owner.graph.call_function(torch.ops.aten.sym_size.int, source)
    node, dim = source
    read.meta |= {"val": fake(node).shape[dim], _READ_FIRST: True}
    return read
