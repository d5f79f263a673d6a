"""Fusion rules and their driver.

A rule names its anchors: the ops that its pattern ends in. The rule's ``match`` function takes an anchor, and returns a
Match or None. The driver refuses a match if a node outside uses an interior node, or if a node between the matched ones
writes memory that the match reads. The driver reports each refusal with its reason.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from dlinfer.graph.ir.dialect import is_pure, model_line, storages
from dlinfer.graph.ir.effects import Effects, effects_of
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit, RefusedMatch, Rewriter


@dataclass(frozen=True)
class Match:
    """Nodes that a rule recognised.

    outputs: the nodes that the replacement's results replace, in order. The replacement stands before the last output,
        or before an earlier user of an output.
    interior: nodes that are erased with the match. Nothing outside may use them.
    inputs: nodes that the replacement reads.
    build: inserts the replacement before a node, and returns the replacement's results.
    shared: nodes that the match looks through, such as casts and views. Nodes outside the match may use them. If none
        does, they are erased.
    """

    outputs: tuple[fx.Node, ...]
    interior: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    build: "Build"
    shared: Iterable[fx.Node] = ()

    @property
    def inside(self) -> set[fx.Node]:
        """The outputs and interior nodes."""
        return {*self.outputs, *self.interior}

    @property
    def passed(self) -> set[fx.Node]:
        """The shared nodes that the replacement does not read."""
        return set(self.shared).difference(self.inputs)


Build = Callable[[Rewriter, Match, fx.Node], Sequence[fx.Node]]


def by(op: object, *more: object, **named: object) -> Build:
    """Return a ``Build`` function that inserts a call of ``op``, with the fake of the match's first output.

    The call takes the match's inputs, then ``more`` and ``named``.
    """
    return lambda rewriter, match, place: [
        rewriter.call_like(match.outputs[0], place, op, *match.inputs, *more, **named)
    ]


def fusion_rule(
    name: str, why: str, anchors: Sequence[object], match: Callable[[fx.Node], Match | None]
) -> Pass:
    """Return a pass that replaces all matches of a pattern. anchors: the ops that the pattern ends in."""

    def run(graph_module: fx.GraphModule) -> list[Edit | RefusedMatch]:
        refused: list[RefusedMatch] = []
        rewriter = Rewriter(graph_module)
        effects = effects_of(graph_module.graph)
        for anchor in list(graph_module.graph.nodes):
            if anchor.target in anchors and not anchor._erased:  # pyright: ignore[reportPrivateUsage]
                candidate = match(anchor)
                if candidate is None:
                    continue
                place = _place(candidate, effects)
                if isinstance(place, str):
                    refused.append(RefusedMatch(anchor.name, place, model_line(anchor)))
                else:
                    _replace(name, rewriter, candidate, place, effects)
        return [*rewriter.edits, *refused]

    return Pass(name, why, run)


def _replace(name: str, rewriter: Rewriter, match: Match, place: fx.Node, effects: Effects) -> None:
    aliases = [alias for node in match.outputs for alias in _aliases(node)]
    new = match.build(rewriter, match, place)
    rewriter.replace(name, match.outputs, new, [*match.interior, *match.passed])
    for node in aliases:
        if not node._erased:  # pyright: ignore[reportPrivateUsage] - a view of the new output's memory
            node.meta["val"] = rewriter.fake_call(node.target, *node.args, **node.kwargs)
    effects.admit(rewriter.graph)


def _place(match: Match, effects: Effects) -> fx.Node | str:
    """Return the node that the replacement is inserted before. If the match is refused, return the reason as a text.

    A match must be pure. Nodes outside may use only its outputs. Between its first node and its last output, no node
    may write memory that the match reads.
    """
    read_through = match.inside | match.passed
    for node in sorted(match.inside.intersection(match.inputs)):
        return f"the replacement would read {node}, which it replaces"
    for node in sorted(read_through):
        if not is_pure(node):
            return f"{node} has an effect besides its result"
    for node in match.interior:
        for user in node.users:
            if user not in read_through:
                return f"{user}, outside the pattern, uses {node}"
    for node in match.outputs:
        if effects.ever_written(node):  # through a view, which must keep sharing the node's memory
            return f"the memory of {node} is written"
    position = effects.position
    first, last = min(read_through, key=position.__getitem__), max(match.outputs, key=position.__getitem__)
    if effects.written_between([*match.inputs, *read_through], first, last):
        return f"memory that the pattern reads is written between {first} and {last}"
    used = [user for node in match.outputs for user in node.users if user not in read_through]
    place = min([last, *used], key=position.__getitem__)
    # A node may use an output before the last output; then all inputs must stand before that node.
    if place is not last and any(position[node] >= position[place] for node in match.inputs):
        return f"{place} uses a result before all inputs exist"
    return place


def _aliases(output: fx.Node) -> list[fx.Node]:
    """Return the nodes that share the memory of ``output`` and depend on it, in the graph's order."""
    aliases: set[fx.Node] = set()
    waiting = [output]
    while waiting:
        for user in waiting.pop().users:
            if user not in aliases and storages(user) & storages(output):
                aliases.add(user)
                waiting.append(user)
    return sorted(aliases)
