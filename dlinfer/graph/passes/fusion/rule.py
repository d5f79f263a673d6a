"""Fusion rules and their driver.

A rule names the ops that its pattern ends in, its anchors. ``match`` takes an anchor and returns a Match or None;
``build`` inserts the replacement. The driver refuses a match with a node that something outside uses, and a match that
reads memory which is written in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from dlinfer.graph.ir.dialect import is_pure, storages
from dlinfer.graph.ir.effects import Effects, effects_of
from dlinfer.graph.passes.rewriter import Edit, Rewriter


@dataclass(frozen=True)
class Match:
    """Nodes that a rule recognised.

    outputs: the nodes that the replacement's results replace, in their order. It is inserted before the last of them.
    interior: nodes that are erased with the match. Nothing outside may use them.
    inputs: nodes that the replacement reads.
    values: other arguments of ``build`` (epsilons, sizes).
    shared: nodes that the match sees through (casts, views). Others may use them; they are erased when nothing does.
    """

    outputs: tuple[fx.Node, ...]
    interior: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    values: dict[str, Any] = field(default_factory=dict)
    shared: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class FusionRule:
    """name: in options and reports. why: the reason, in a sentence. anchors: the ops that its pattern ends in."""

    name: str
    why: str
    anchors: tuple[Any, ...]
    match: Callable[[fx.Node], Match | None]
    build: Callable[[Rewriter, Match, fx.Node], Sequence[fx.Node]]


def replace_by(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    """Build one call of ``values["op"]`` on the inputs, ``arguments`` and ``named``, with the old output's fake."""
    op, more, named = match.values["op"], match.values.get("arguments", ()), match.values.get("named", {})
    return [rewriter.call_like(match.outputs[0], place, op, *match.inputs, *more, **named)]


def apply_rule(rule: FusionRule, graph_module: fx.GraphModule) -> list[Edit]:
    """Apply one rule wherever it matches. Returns the edits."""
    rewriter = Rewriter(graph_module)
    effects = effects_of(graph_module.graph)
    for anchor in list(graph_module.graph.nodes):
        if anchor.op != "call_function" or anchor.target not in rule.anchors or anchor._erased:
            continue
        match = rule.match(anchor)
        place = _place(match, effects) if match is not None else None
        if match is None or place is None:
            continue
        aliases = [alias for node in match.outputs for alias in _aliases(node)]
        new = rule.build(rewriter, match, place)
        rewriter.replace(rule.name, match.outputs, new, [*match.interior, *match.shared])
        for node in aliases:
            if not node._erased:  # a view of the new output's memory
                node.meta["val"] = rewriter.fake_call(node.target, *node.args, **node.kwargs)
        effects.admit(graph_module.graph)
    return rewriter.edits


def _place(match: Match, effects: Effects) -> fx.Node | None:
    """The node before which the replacement is inserted; None where the match is refused.

    A match must be pure, used from outside only through its outputs, and read one state of memory.
    """
    inside = {*match.outputs, *match.interior}
    if not inside.isdisjoint(match.inputs):
        return None
    if not all(is_pure(node) for node in (*inside, *match.shared)):
        return None
    read_through = inside.union(match.shared)
    if any(user not in read_through for node in match.interior for user in node.users):
        return None
    if any(effects.ever_written(node) for node in match.outputs):
        return None  # a view of an output is written, and must keep sharing its memory
    position = effects.position
    last = max(match.outputs, key=position.__getitem__)
    if effects.written_between(
        [*match.inputs, *read_through], min(read_through, key=position.__getitem__), last
    ):
        return None
    used = [user for node in match.outputs for user in node.users if user not in read_through]
    place = min([last, *used], key=position.__getitem__)
    # A node may use an output before the last output; then all inputs must stand before that node.
    if place is not last and any(position[node] >= position[place] for node in match.inputs):
        return None
    return place


def _aliases(output: fx.Node) -> list[fx.Node]:
    """The nodes outside a match whose results share an output's memory, in the graph's order."""
    aliases: set[fx.Node] = set()
    waiting = [output]
    while waiting:
        for user in waiting.pop().users:
            if user not in aliases and storages(user) & storages(output):
                aliases.add(user)
                waiting.append(user)
    return sorted(aliases)
