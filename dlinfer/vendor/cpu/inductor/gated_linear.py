"""Fuse a linear layer and the silu_and_mul right behind it into one C++ kernel, with bitwise equal results."""

from collections.abc import Sequence

from torch import fx

from dlinfer.graph.ir.program import Step

CALLEES = {
    "native linear": "native linear_silu_and_mul",
    "native linear_bf12": "native linear_bf12_silu_and_mul",
}
"""Callee of a linear layer -> callee that computes the layer and silu_and_mul."""


def linear_of(node: fx.Node, reference: str, steps: Sequence[Step]) -> Step | None:
    """Return the step before ``node`` if it is a linear layer to fuse with ``node``, a silu_and_mul; else None.

    Only ``node`` may read the layer's result.
    reference: the callee of ``node``. If it is not the one of silu_and_mul, the result is None.
    steps: the steps before ``node``.
    """
    if reference != "native silu_and_mul" or not steps or node.kwargs:
        return None
    before = steps[-1]
    source = node.args[0]
    if not isinstance(source, fx.Node) or len(source.users) != 1:
        return None
    return before if before.callee in CALLEES and before.results == source.name else None
