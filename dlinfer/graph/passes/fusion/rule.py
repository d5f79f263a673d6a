"""A fusion rule is data: what it looks for, what it puts there, and why that is worth it.

A rule names the ops that its pattern ends in. ``match`` looks from such a node upwards and gives a Match or None;
``build`` makes the replacement. The driver offers every anchor to every rule, in order, and checks what all rules
must respect: nothing inside a match is used outside it, and no memory that the match reads is written in between.
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

    outputs: the nodes whose results the replacement gives, in its order; the last of them in the graph is where
        the replacement stands.
    interior: nodes that vanish with the match; none may be used outside it.
    inputs: nodes that the replacement reads.
    shared: nodes that the match reads through (a cast, a table made ready for broadcasting) and that others may
        use too; they vanish when nobody does.
    values: what ``build`` needs besides (epsilons, sizes).
    """

    outputs: tuple[fx.Node, ...]
    interior: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    values: dict[str, Any] = field(default_factory=dict)
    shared: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class FusionRule:
    """name: as options and reports call it. why: the reason, in a sentence. anchors: overloads it ends in."""

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
    """Apply one rule wherever it matches; gives the edits."""
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
    """Before which node the replacement can stand; None when the match cannot become one node.

    It must be pure, used from outside only by its outputs, and read one state of memory.
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
        return None  # views of an output are written: which memory they share must not change
    position = effects.position
    last = max(match.outputs, key=position.__getitem__)
    if effects.written_between(
        [*match.inputs, *read_through], min(read_through, key=position.__getitem__), last
    ):
        return None
    used = [user for node in match.outputs for user in node.users if user not in read_through]
    place = min([last, *used], key=position.__getitem__)
    # An output may be used before the last of them is computed, when all inputs exist by then.
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
