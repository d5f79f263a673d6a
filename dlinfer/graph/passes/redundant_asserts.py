"""Drop checks of sizes that cannot fail: a size is not negative, and what is one number is equal to itself.

torch writes a check into the graph for each thing that it assumed of a size without an example. Once equal sizes are
one node, most of them say nothing, and each would be two steps at every call. A check of a number that data give, as
``item()`` does, stays: what torch knows of its range it knows from the check.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.dialect import fake, model_line
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit
from dlinfer.graph.torch_private.symbols import plain_symbol

_aten = torch.ops.aten


def _run(graph_module: fx.GraphModule) -> list[Edit]:
    graph = graph_module.graph
    sizes = set(_sizes_given(graph))
    edits = []
    for node in graph.find_nodes(op="call_function", target=_aten._assert_scalar.default):
        if _holds(node.args[0], sizes):
            edits.append(Edit("drop check that holds", (node.name,), (), model_line(node)))
            graph.erase_node(node)
    return edits


def _sizes_given(graph: fx.Graph) -> Iterator[Any]:
    """The symbols that are sizes of the graph's inputs."""
    for node in graph.find_nodes(op="placeholder"):
        value = fake(node)
        if isinstance(value, torch.Tensor):
            yield from filter(None, map(plain_symbol, value.shape))


def _holds(condition: object, sizes: set[Any]) -> bool:
    if condition is True:
        return True
    if not isinstance(condition, fx.Node) or len(condition.args) != 2:
        return False
    one, other = condition.args
    if condition.target is operator.eq:
        return isinstance(one, fx.Node) and one is other and isinstance(fake(one), (int, torch.SymInt))
    if condition.target is not operator.ge or not isinstance(one, fx.Node):
        return False
    return isinstance(other, int) and other == 0 and _is_size(one, sizes)


def _is_size(node: fx.Node, sizes: set[Any]) -> bool:
    if node.target is _aten.sym_size.int:
        return True
    return node.op == "placeholder" and plain_symbol(fake(node)) in sizes


REDUNDANT_ASSERTS = Pass("redundant_asserts", "a size is checked for what every size is, at each call", _run)
