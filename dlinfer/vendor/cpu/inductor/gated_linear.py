"""A linear layer and silu_and_mul right behind it, as one kernel in C++ that gives the bits of the two."""

from collections.abc import Sequence

from torch import fx

from dlinfer.graph.ir.program import Step

CALLEES = {
    "native linear": "native linear_silu_and_mul",
    "native linear_bf12": "native linear_bf12_silu_and_mul",
}
"""Of a linear layer: what computes it and silu_and_mul."""


def linear_of(node: fx.Node, reference: str, steps: Sequence[Step]) -> Step | None:
    """The step of a linear layer that a node, which ``reference`` runs, is the only reader of and comes right behind.

    steps: those before the node's. None where there is no such layer.
    """
    if reference != "native silu_and_mul" or not steps or node.kwargs:
        return None
    before = steps[-1]
    source = node.args[0]
    if not isinstance(source, fx.Node) or len(source.users) != 1:
        return None
    return before if before.callee in CALLEES and before.results == source.name else None
