"""Partition a graph: choose the regions that the engine compiles, and the nodes that run eagerly.

Few and large regions are best. But a region must not depend on its own results by way of an eager node. So each node
gets a level:

- An accepted node is at least one level above each refused node that it depends on.
- A refused node is on the highest level of the nodes that it depends on.

The levels run in order. On each level, all accepted nodes form one region, and the refused nodes run after this region.
This gives as few regions as the refused nodes allow. Nodes that read and write the same memory also depend on each
other (``ir/effects``).

Each eager node that computes has a reason, for reports.
"""

import operator
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import fx

from dlinfer.graph.engine import Engine
from dlinfer.graph.ir.dialect import is_compute, is_pure, memory_read, op_name, schema_name
from dlinfer.graph.ir.effects import Effects, effects_of


@dataclass
class Part:
    """Nodes that run together in the engine, or one by one with eager kernels."""

    in_engine: bool
    nodes: list[fx.Node] = field(default_factory=list[fx.Node])


@dataclass
class Partition:
    """The parts of a graph, in running order.

    refusals: node -> the reason why the node runs outside the engine.
    by_choice: nodes that run eagerly but do not count as fallbacks. They call an op in the option ``eager_ops``, or
        belong to a small region.
    """

    parts: list[Part]
    refusals: dict[fx.Node, str]
    by_choice: set[fx.Node]


def partition(
    graph: fx.Graph, engine: Engine, *, keep_small: bool, eager_ops: Collection[str] = ()
) -> Partition:
    """Divide a graph between ``engine`` and eager kernels.

    keep_small: whether the engine also runs small regions. eager_ops: names of ops that stay out of the engine.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    by_choice = {node for node in calls if eager_ops and _is_named(node, eager_ops)}
    refusals = dict.fromkeys(by_choice, "excluded by eager_ops")
    refusals |= {
        node: reason
        for node in calls
        if node not in by_choice and (reason := engine.refuses(node)) is not None
    }
    levels = _levels(calls, refusals, effects_of(graph))
    parts: list[Part] = []
    for level in range(max(levels.values(), default=-1) + 1):
        here = [node for node in calls if levels[node] == level]
        taken = [node for node in here if node not in refusals]
        left = [node for node in here if node in refusals]
        parts += [part for part in (Part(True, taken), Part(False, left)) if part.nodes]
    for part in parts:
        reason = engine.entry_cost(part.nodes) if part.in_engine and not keep_small else None
        if reason is not None:
            part.in_engine = False
            by_choice.update(part.nodes)
            refusals |= {node: reason for node in part.nodes if is_compute(node)}
    return Partition(parts, refusals, by_choice)


def _is_named(node: fx.Node, eager_ops: Collection[str]) -> bool:
    """Return whether a node calls one of ``eager_ops``, or takes an item of the result of such a call."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _is_named(node.args[0], eager_ops)
    return op_name(node) in eager_ops or schema_name(node).replace("::", ".") in eager_ops


def _levels(calls: list[fx.Node], refusals: dict[fx.Node, str], effects: Effects) -> dict[fx.Node, int]:
    levels: dict[fx.Node, int] = {}
    last_write: dict[int, fx.Node] = {}
    last_reads: dict[int, list[fx.Node]] = {}
    last_effect: fx.Node | None = None
    for node in calls:
        before = set(node.all_input_nodes)
        written, read = effects.writes(node), memory_read(node)
        before |= {last_write[memory] for memory in read | written if memory in last_write}
        for memory in written:
            before |= set(last_reads.pop(memory, ()))
            last_write[memory] = node
        for memory in read - written:
            last_reads.setdefault(memory, []).append(node)
        if not is_pure(node):  # writes, draws and messages keep their order
            before |= {last_effect} if last_effect is not None else set()
            last_effect = node
        level = 0
        for parent in before:
            if parent in levels:
                level = max(level, levels[parent] + (parent in refusals and node not in refusals))
        levels[node] = level
    return levels
