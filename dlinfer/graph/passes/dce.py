"""DCE: erase pure nodes that nothing uses. Writes, random draws and ops with hidden effects stay."""

from torch import fx

from dlinfer.graph.ir.dialect import is_pure
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit, erase


def _run(graph_module: fx.GraphModule) -> list[Edit]:
    edits = [
        erase("drop unused node", node)
        for node in reversed(list(graph_module.graph.nodes))
        if not node.users and is_pure(node)
    ]
    return edits[::-1]


DCE = Pass("dce", "a model computes some results that no node reads", _run)
