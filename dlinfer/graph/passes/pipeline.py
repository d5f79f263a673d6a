"""Run passes in order, verify the graph after each pass, and report each pass with its edits and its time."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from dlinfer.errors import PassError
from dlinfer.graph.ir.dialect import gives_something, has_hidden_effects, op_name, written_arguments
from dlinfer.graph.passes.rewriter import Edit, RefusedMatch

StandsFor = Callable[[fx.Node], Sequence[object] | None]
"""A function that takes a node, and returns the mutating ops that the node replaced, in order; None if there are none.
"""


@dataclass(frozen=True)
class Pass:
    """One pass over a graph.

    name: the name in options and reports.
    why: the purpose of the pass, in a sentence.
    run: changes a graph in place. It returns the edits, and the matches that a fusion rule refused.
    stands_for: takes a node that this pass may have inserted, and returns the mutating ops that the node replaced.
    always: whether options cannot turn the pass off, because results may be wrong without it.
    """

    name: str
    why: str
    run: Callable[[fx.GraphModule], Sequence[Edit | RefusedMatch]]
    stands_for: StandsFor = lambda node: None
    always: bool = False


@dataclass
class PassReport:
    """The edits of one pass to one graph.

    name, why: the pass's name and purpose.
    seconds: the time that the pass took.
    nodes: the number of nodes in the graph after the pass.
    refused: the matches that a fusion rule did not replace.
    """

    name: str
    why: str
    edits: list[Edit] = field(default_factory=list[Edit])
    seconds: float = 0.0
    nodes: int = 0
    refused: list[RefusedMatch] = field(default_factory=list[RefusedMatch])


def run_passes(
    graph_module: fx.GraphModule,
    passes: Sequence[Pass],
    *,
    disabled: Collection[str] = (),
    show: Callable[[PassReport, fx.GraphModule], None] | None = None,
) -> list[PassReport]:
    """Run the passes that are not disabled, in order, and return their reports.

    show: called after each pass. Raises PassError if a pass leaves an invalid graph.
    """
    reports: list[PassReport] = []
    verify(graph_module, "capture", None)
    for item in passes:
        if item.name in disabled:
            continue
        before = _interface(graph_module, item.stands_for)
        start = time.perf_counter()
        changes = item.run(graph_module)
        seconds, nodes = time.perf_counter() - start, len(graph_module.graph.nodes)
        edits = [change for change in changes if isinstance(change, Edit)]
        refused = [change for change in changes if isinstance(change, RefusedMatch)]
        report = PassReport(item.name, item.why, edits, seconds, nodes, refused)
        verify(graph_module, item.name, before, item.stands_for)
        reports.append(report)
        if show is not None:
            show(report, graph_module)
    graph_module.recompile()
    return reports


_Interface = Mapping[str, list[str]]


def _interface(graph_module: fx.GraphModule, stands_for: StandsFor) -> _Interface:
    """Return what passes must keep: the inputs, the writes in order, and the ops with hidden effects."""
    nodes = graph_module.graph.nodes
    writing = [stands_for(node) or (node.target,) for node in nodes if written_arguments(node)]
    return {
        "the inputs": [node.name for node in nodes if node.op == "placeholder"],
        "the writes": [str(target) for targets in writing for target in targets],
        "ops with effects": [op_name(node) for node in nodes if has_hidden_effects(node)],
    }


def verify(
    graph_module: fx.GraphModule,
    stage: str,
    before: _Interface | None,
    stands_for: StandsFor = Pass.stands_for,
) -> None:
    """Raise PassError if a pass left an invalid graph.

    In a valid graph, nodes are in order and have fakes. The inputs, the writes and the ops with hidden effects must be
    those before the pass, except that writes may be missing.
    stage: the name of the pass, for the error.
    before: inputs, writes and effects before the pass. None skips the comparison. stands_for: as in ``Pass``.
    """
    try:
        graph_module.graph.lint()
    except RuntimeError as cause:
        raise PassError(stage=stage, detail=str(cause)) from cause
    for node in graph_module.graph.nodes:
        if node.op not in ("output", "get_attr") and "val" not in node.meta and gives_something(node):
            raise PassError(stage=stage, detail=f"node {node.format_node()} has no fake result")
    if before is not None:
        for what, now in _interface(graph_module, stands_for).items():
            rest = iter(before[what])  # a pass may drop writes, not reorder them
            is_kept = all(item in rest for item in now) if what == "the writes" else now == before[what]
            if not is_kept:
                raise PassError(stage=stage, detail=f"{what} changed from {before[what]} to {now}")
