"""Replace an in-place op by its out-of-place form if nothing else can see the write.

``weights /= weights.sum(-1, keepdim=True)`` and ``scores += mask`` write into a temporary. Fusion rules match only pure
nodes, and the out-of-place op is pure. The pass must keep a write to memory that existed before the graph, or that is
read later other than through the op's result.
"""

from torch import fx

from dlinfer.graph.ir.dialect import (
    out_of_place,
    overload,
    reshapes_argument,
    storages,
    tensor_or_none,
    written_arguments,
)
from dlinfer.graph.ir.effects import Memory
from dlinfer.graph.ir.layout import same_place
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit, Rewriter


def _run(graph_module: fx.GraphModule) -> list[Edit]:
    rewriter = Rewriter(graph_module)
    nodes = list(graph_module.graph.nodes)
    seen = _Seen({node: index for index, node in enumerate(nodes)})
    moved: dict[fx.Node, Memory] = {}  # nodes whose memory is new -> their old memory
    for node in nodes:
        before = frozenset(storages(node))
        if any(parent in moved and not moved[parent].isdisjoint(before) for parent in node.all_input_nodes):
            node.meta["val"] = rewriter.fake_call(node.target, *node.args, **node.kwargs)
            moved[node] = before
        new = _functionalize(rewriter, node, seen) if node.op == "call_function" else None
        if new is None:
            seen.add(node, seen.position[node])
            continue
        moved[new] = before
        seen.add(new, seen.position[node])
    return rewriter.edits


def _functionalize(rewriter: Rewriter, write: fx.Node, seen: "_Seen") -> fx.Node | None:
    """Replace a write that is private (``_Seen.is_private``) by a call of the out-of-place op, and return the call.

    Return None if the write is not private, or the new result would have other sizes, strides or another dtype.
    """
    op = overload(write)
    functional = out_of_place(op) if op is not None else None
    if functional is None or not seen.is_private(write):
        return None
    new = rewriter.call(write, functional, *write.args, **write.kwargs)
    result, fresh = tensor_or_none(write), tensor_or_none(new)
    if result is None or fresh is None or not same_place(result, fresh):
        rewriter.graph.erase_node(new)  # the write also casts, or fills a part of something larger
        return None
    rewriter.replace(f"{op} out of place", [write], [new])
    return new


class _Seen:
    """The record of earlier nodes, while ``_run`` walks over the graph.

    position: node -> its place in the graph.
    last_use: memory -> the position of its last reader.
    outside: memory that existed before the graph, or that an op such as ``set_`` may give to another tensor.

    The walk adds each node once, so a pass over n writes takes O(n).
    """

    def __init__(self, position: dict[fx.Node, int]) -> None:
        self.position = position
        self.last_use: dict[int, int] = {}
        self.outside: set[int] = set()

    def add(self, node: fx.Node, position: int) -> None:
        """Add a node at its position, or at the position of the node that it replaced."""
        self.position[node] = position
        last = max((self.position[user] for user in node.users), default=-1)
        for memory in storages(node):
            self.last_use[memory] = max(self.last_use.get(memory, -1), last)
            if node.op != "call_function" or reshapes_argument(node):  # ``set_``: another tensor has it too
                self.outside.add(memory)

    def is_private(self, write: fx.Node) -> bool:
        """Return whether the graph allocated the written memory, and later reads it only through the write's result."""
        target = write.args[0]
        if not isinstance(target, fx.Node) or written_arguments(write) != [target]:
            return False
        memory = storages(write) | storages(target)
        return (
            bool(memory)
            and self.outside.isdisjoint(memory)
            and all(self.last_use.get(storage, -1) <= self.position[write] for storage in memory)
        )


FUNCTIONALIZE_WRITES = Pass(
    name="functionalize_writes",
    why="A write into a temporary hides patterns and forbids reordering.",
    run=_run,
)
