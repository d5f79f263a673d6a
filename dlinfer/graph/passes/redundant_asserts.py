"""Drop assertions that cannot fail: a size is at least 0, and a number is equal to itself.

torch asserts each assumption about an unbacked size. After CSE has made equal sizes one node, most of these assertions
cannot fail. Assertions about numbers from tensor data (``item()``) must stay, because torch derives the ranges of these
numbers from the assertions.
"""

import operator

import torch
from torch import fx

from dlinfer.graph.ir.dialect import fake, tensor_or_none
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit, erase
from dlinfer.graph.torch_private.symbols import plain_symbol

_aten = torch.ops.aten


def _run(graph_module: fx.GraphModule) -> list[Edit]:
    graph = graph_module.graph
    inputs = map(tensor_or_none, graph.find_nodes(op="placeholder"))
    sizes: set[object] = {
        plain_symbol(size) for tensor in inputs if tensor is not None for size in tensor.shape
    }
    sizes.discard(None)
    asserts = graph.find_nodes(op="call_function", target=_aten._assert_scalar.default)
    return [erase("drop check that holds", node) for node in asserts if _holds(node.args[0], sizes)]


def _holds(condition: object, sizes: set[object]) -> bool:
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


def _is_size(node: fx.Node, sizes: set[object]) -> bool:
    if node.target is _aten.sym_size.int:
        return True
    return node.op == "placeholder" and plain_symbol(fake(node)) in sizes


REDUNDANT_ASSERTS = Pass("redundant_asserts", "assertions that always hold cost two steps at each call", _run)
