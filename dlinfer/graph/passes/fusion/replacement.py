"""New nodes that give just what an old one gave."""

from collections.abc import Callable
from typing import Any

from torch import fx

from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.passes.rewriter import Rewriter


def call_like(
    rewriter: Rewriter, old: fx.Node, at: fx.Node, op: Callable[..., Any], *args: Any, **kwargs: Any
) -> fx.Node:
    """A new node before ``at`` whose fake result is the old node's own.

    What the graph takes for a view of the old result it takes for one of the new, and the op need not run on
    fakes, which costs some ten milliseconds with symbolic sizes. Shapes, dtypes and strides must be the same.
    """
    with rewriter.graph.inserting_before(at):
        node = rewriter.graph.call_function(op, args, kwargs)
    for key in ("stack_trace", "nn_module_stack"):
        if key in at.meta:
            node.meta[key] = at.meta[key]
    node.meta["val"] = fake(old)
    return node
