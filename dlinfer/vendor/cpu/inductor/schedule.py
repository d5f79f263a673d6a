"""The running order of a region (part of a graph): kernels in the model's order, and clusters of loops between them.

Kernels (library calls, dlinfer's heavy ops, writes, random draws) keep their order. A node that inductor compiles to
loops moves as late as its users, and later writes to its inputs, allow. So all such nodes that are needed by the same
kernel meet right before it, and form one cluster. The repeated layers of a model give equal clusters, which are
compiled once."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from dlinfer.graph.ir.dialect import (
    is_as_strided,
    is_pure,
    is_size,
    is_view,
    memory_read,
    reads_number,
    storages,
)
from dlinfer.graph.ir.effects import Effects, effects_of, has_layout, reshaped_memory
from dlinfer.vendor.cpu.inductor.fusible import loops_of


@dataclass(frozen=True)
class Cluster:
    """Nodes that are compiled together.

    members: the nodes that the cluster computes.
    body: the members, and the views and sizes that they read, in running order.
    outputs: members that are read outside the cluster."""

    members: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...] = ()
    outputs: tuple[fx.Node, ...] = ()


Item = fx.Node | Cluster


def schedule(graph: fx.Graph, *, smallest: int) -> list[Item]:
    """Return nodes and clusters in running order. A cluster of fewer than ``smallest`` loops becomes single nodes."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    kinds = _kinds(calls)
    for node in calls:  # a tuple's items stay with the tuple
        if node.target is operator.getitem and kinds.get(node.args[0]) == "loop":
            kinds[node] = "loop"
    _keep_in_place(calls, kinds)
    slots = _latest_slots(graph, calls, kinds)
    by_slot: dict[float, list[fx.Node]] = {}
    for node in calls:
        by_slot.setdefault(slots[node], []).append(node)
    items: list[Item] = []
    for slot in sorted(by_slot):
        items += _slot_items(by_slot[slot], kinds, smallest)
    return _with_liveness(graph, items, kinds)


def _kinds(calls: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Return the kind of each node: "loop", "kernel", "view" or "size".

    Inductor's loops need the strides of the tensors that they read. So a node that reads a tensor of uncertain strides
    is a kernel.
    """
    kinds: dict[fx.Node, str] = {}
    uncertain: set[int] = set()
    for node in calls:
        kind = _kind(node)
        if kind == "loop" and not uncertain.isdisjoint(memory_read(node)):
            kind = "kernel"
        if kind != "loop" and not has_layout(node):
            uncertain |= storages(node)
        kinds[node] = kind
    return kinds


def _kind(node: fx.Node) -> str:
    if is_size(node) and is_pure(node) and not reads_number(node):
        return "size"
    if node.target is operator.getitem or is_view(node):
        # Inductor counts the offset of ``as_strided`` from the beginning of the cluster's input, not from its storage.
        return "kernel" if is_as_strided(node) else "view"
    if is_pure(node) and loops_of(node):
        return "loop"
    return "kernel"


def _keep_in_place(calls: Sequence[fx.Node], kinds: dict[fx.Node, str]) -> None:
    """Set the kind of some views and sizes to "kernel", because only kernels keep their order.

    These views and sizes are of tensors that the graph reshapes in place.
    """
    reshaped = reshaped_memory(calls)
    for node in calls:
        if kinds[node] in ("view", "size") and not reshaped.isdisjoint(memory_read(node)):
            kinds[node] = "kernel"


def _latest_slots(
    graph: fx.Graph, calls: Sequence[fx.Node], kinds: dict[fx.Node, str]
) -> dict[fx.Node, float]:
    """Return node -> the latest slot for the node to run.

    Kernel number k, from 0, runs in slot k + 0.5. Other nodes run in whole slots: slot k comes right before kernel k.
    """
    effects = effects_of(graph)
    kernels = [node for node in calls if kinds[node] == "kernel"]
    number = {node: index for index, node in enumerate(kernels)}
    writers = [(index, node) for node, index in number.items() if not is_pure(node)]
    slots: dict[fx.Node, float] = {}
    for node in reversed(calls):
        if kinds[node] == "kernel":
            slots[node] = number[node] + 0.5
            continue
        slot: float = len(kernels)
        for user in node.users:
            if user in slots:
                slot = min(slot, slots[user] if kinds[user] != "kernel" else number[user])
        if kinds[node] == "loop":
            for index, writer in writers:
                later = effects.position[writer] > effects.position[node] and index < slot
                if later and effects.written_between(node.all_input_nodes, node, _after(writer, effects)):
                    slot = index
                    break
        slots[node] = slot
    for node in calls:  # a tuple's items exist as soon as the tuple does
        if kinds[node] == "loop" and node.target is operator.getitem:
            slots[node] = slots[node.args[0]]  # pyright: ignore[reportArgumentType]
    return slots


def _after(writer: fx.Node, effects: Effects) -> fx.Node:
    """Return the node after a writer, as the end for ``Effects.written_between``, which excludes its end."""
    follower = writer.next
    return follower if follower in effects.position else writer


def _slot_items(nodes: list[fx.Node], kinds: dict[fx.Node, str], smallest: int) -> list[Item]:
    loops = [node for node in nodes if kinds[node] == "loop"]
    if sum(loops_of(node) for node in loops) < smallest:
        return list(nodes)
    # Views of the cluster's results come after it. Views and sizes of earlier results may come before or after.
    inside = set(loops)
    late: list[fx.Node] = []
    early: list[fx.Node] = []
    depends = set(loops)
    for node in nodes:
        if node in inside:
            continue
        if any(parent in depends for parent in node.all_input_nodes):
            depends.add(node)
            late.append(node)
        else:
            early.append(node)
    return [*early, Cluster(tuple(loops)), *late]


def _with_liveness(graph: fx.Graph, items: Sequence[Item], kinds: dict[fx.Node, str]) -> list[Item]:
    """Drop items that nothing needs, and fill in the body and outputs of each cluster.

    A cluster computes the views and sizes that it reads itself, so most of these are not needed as items."""
    needed = set(graph.output_node().all_input_nodes)
    order = {node: index for index, node in enumerate(graph.nodes)}
    kept: list[Item] = []
    for item in reversed(items):
        if isinstance(item, Cluster):
            outputs = tuple(node for node in item.members if node in needed)
            if not outputs:
                continue
            body = _body(item.members, order, kinds)
            inside = set(body)
            needed.update(parent for node in body for parent in node.all_input_nodes if parent not in inside)
            kept.append(Cluster(item.members, body, outputs))
        elif item in needed or not is_pure(item):
            needed.update(item.all_input_nodes)
            kept.append(item)
    kept.reverse()
    return kept


def _body(
    members: Sequence[fx.Node], order: dict[fx.Node, int], kinds: dict[fx.Node, str]
) -> tuple[fx.Node, ...]:
    """Return a cluster's members and the views and sizes that they read, in the graph's order."""
    body = set(members)
    waiting = list(members)
    while waiting:
        for parent in waiting.pop().all_input_nodes:
            if parent not in body and kinds.get(parent) in ("view", "size") and _comes_along(parent):
                body.add(parent)
                waiting.append(parent)
    return tuple(sorted(body, key=order.__getitem__))


def _comes_along(node: fx.Node) -> bool:
    """Return whether a cluster can compute a view or size itself, at no cost: loops can index the viewed tensor."""
    if node.target is operator.getitem and not is_size(node):
        source = node.all_input_nodes[0]
        return source.op == "call_function" and is_view(source)
    return True
