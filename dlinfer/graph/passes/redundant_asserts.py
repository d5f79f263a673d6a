"""Drop assertions that cannot fail: a size is at least 0, and a number is equal to itself.

torch asserts each assumption about an unbacked size. CSE makes equal sizes one node, and then most of these assertions
are trivial. Assertions about numbers that data give (``item()``) must stay, because torch takes their range from them.
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
    sizes = set(_input_sizes(graph))
    edits: list[Edit] = []
    for node in graph.find_nodes(op="call_function", target=_aten._assert_scalar.default):
        if _holds(node.args[0], sizes):
            edits.append(Edit("drop check that holds", (node.name,), (), model_line(node)))
            graph.erase_node(node)
    return edits


def _input_sizes(graph: fx.Graph) -> Iterator[Any]:
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
    left, right = condition.args
    if condition.target is operator.eq:
        return isinstance(left, fx.Node) and left is right and isinstance(fake(left), (int, torch.SymInt))
    if condition.target is not operator.ge or not isinstance(left, fx.Node):
        return False
    return isinstance(right, int) and right == 0 and _is_size(left, sizes)


def _is_size(node: fx.Node, sizes: set[Any]) -> bool:
    if node.target is _aten.sym_size.int:
        return True
    return node.op == "placeholder" and plain_symbol(fake(node)) in sizes


REDUNDANT_ASSERTS = Pass("redundant_asserts", "assertions that always hold cost two steps at each call", _run)
