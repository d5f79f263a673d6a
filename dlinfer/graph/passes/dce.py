"""DCE: erase pure nodes that nothing uses. Writes, random draws and ops with hidden effects stay."""

from torch import fx

from dlinfer.graph.ir.dialect import is_pure, model_line
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit


def _run(graph_module: fx.GraphModule) -> list[Edit]:
    edits: list[Edit] = []
    for node in reversed(list(graph_module.graph.nodes)):
        if node.op in ("placeholder", "output") or node.users or not is_pure(node):
            continue
        edits.append(Edit("drop unused node", (node.name,), (), model_line(node)))
        graph_module.graph.erase_node(node)
    edits.reverse()
    return edits


DCE = Pass("dce", "a model computes some things that nobody reads", _run)
