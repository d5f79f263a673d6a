"""Writes that nobody else can see become plain results, so that patterns show through them.

``weights /= weights.sum(-1, keepdim=True)`` and ``scores += mask`` write into a tensor that was made one line
above and is not looked at again but through the result. Rules only match what is pure, and the out-of-place twin
of such an op is.
"""

from itertools import takewhile

from torch import fx

from dlinfer.graph.ir.dialect import out_of_place, overload, storages, written_arguments
from dlinfer.graph.ir.layout import same_place
from dlinfer.graph.passes.fusion.geometry import tensor
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewrite import Edit, Rewriter


def _run(graph_module: fx.GraphModule) -> list[Edit]:
    rewriter = Rewriter(graph_module)
    for node in list(graph_module.graph.nodes):
        op = overload(node)
        twin = out_of_place(op) if op is not None else None
        if twin is None or not _is_private(node):
            continue
        new = rewriter.call(node, twin, *node.args, **node.kwargs)
        result, fresh = tensor(node), tensor(new)
        if result is None or fresh is None or not same_place(result, fresh):
            graph_module.graph.erase_node(
                new
            )  # the write also converted, or filled a part of something larger
            continue
        later = _aliases_after(node)
        rewriter.replace(f"{overload(node)} out of place", [node], [new])
        for alias in later:
            alias.meta["val"] = rewriter.fake_call(alias.target, *alias.args, **alias.kwargs)
    return rewriter.edits


def _is_private(write: fx.Node) -> bool:
    """Whether the written memory was made in the graph and is seen after the write only through its result."""
    target, memory = write.args[0], storages(write)
    if written_arguments(write) != [target] or not memory:
        return False
    earlier = takewhile(lambda node: node is not write, write.graph.nodes)
    return all(
        node.op == "call_function" and all(user is write or user < write for user in node.users)
        for node in earlier
        if storages(node) & memory
    )


def _aliases_after(write: fx.Node) -> list[fx.Node]:
    memory = storages(write)
    later = [node for node in write.graph.nodes if node > write and storages(node) & memory]
    return [node for node in later if node.op == "call_function"]


PRIVATE_WRITES = Pass(
    name="private_writes",
    why="A write into a tensor that only its result is seen of hides patterns, and forbids reordering for nothing.",
    run=_run,
)
