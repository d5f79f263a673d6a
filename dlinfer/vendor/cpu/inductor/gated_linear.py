"""Fuse a linear layer and the silu_and_mul right behind it into one C++ kernel. The result is the same bit for bit."""

from collections.abc import Sequence

from torch import fx

from dlinfer.graph.ir.program import Step

CALLEES = {
    "native linear": "native linear_silu_and_mul",
    "native linear_bf12": "native linear_bf12_silu_and_mul",
}
"""Callee of a linear layer -> callee that computes the layer and silu_and_mul."""


def linear_of(node: fx.Node, reference: str, steps: Sequence[Step]) -> Step | None:
    """Return the last step if it is a linear layer that only ``node`` reads; else None.

    reference: the node's callee, which must be silu_and_mul. steps: the steps before the node.
    """
    if reference != "native silu_and_mul" or not steps or node.kwargs:
        return None
    before = steps[-1]
    source = node.args[0]
    if not isinstance(source, fx.Node) or len(source.users) != 1:
        return None
    return before if before.callee in CALLEES and before.results == source.name else None
