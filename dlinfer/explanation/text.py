"""Render an explanation as plain text: a short summary, or everything."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from dlinfer.explanation.fields import Facts
from dlinfer.graph.report.report import FIRST_CALL, LOADED, GraphReport


def summary_of(explanation: Facts) -> str:
    """Return a few lines: the number of graphs, the fusion rules that fired, and the ops outside the engine."""
    return "\n".join(_summary(explanation)) + "\n"


def text_of(explanation: Facts) -> str:
    """Return the summary, followed by every graph with all its facts."""
    lines = _summary(explanation)
    for number, graph in enumerate(explanation.graphs):
        lines += ["", *_graph(number, graph)]
    return "\n".join(lines) + "\n"


def headline(explanation: Facts) -> dict[str, str]:
    engine = sum(len(graph.placed("engine")) for graph in explanation.graphs)
    eager = sum(len(graph.placed("eager")) for graph in explanation.graphs)
    return {
        "graphs": str(len(explanation.graphs)),
        "in the engine": f"{explanation.coverage:.0%} ({engine} of {engine + eager} nodes that compute)",
        "matrix products": f"{explanation.flop_coverage:.0%} of their operations in the engine",
        "recompiles": str(len(explanation.recompiles)),
        "size-1 variants": str(len(explanation.size_1_variants)),
        "graph breaks": str(sum(item.count for item in explanation.graph_breaks)),
        "fused": counts(explanation.fired),
        "disk cache": counts(explanation.cache),
        "time": duration(explanation.seconds),
    }


def _summary(explanation: Facts) -> list[str]:
    lines = [f"dlinfer explain: {explanation.model}", *table(headline(explanation).items(), "  ")]
    lines.append(f"  with {', '.join(f'{name} {version}' for name, version in explanation.versions.items())}")
    if not explanation.graphs:
        lines.append("no graph was captured: the model ran without dlinfer")
    for broken in explanation.graph_breaks:
        often = f" ({broken.count} times)" if broken.count > 1 else ""
        lines += [f"graph break{often}: {broken.reason}", f"  at {short_line(broken.line)}"]
    for number, graph in enumerate(explanation.graphs):
        if graph.cause not in (FIRST_CALL, LOADED):
            lines += [f"{explanation.kind_of(graph)}: graph {number}, {short_cause(graph.cause)}"]
        if graph.refused:
            lines.append(f"graph {number} runs without dlinfer: {graph.refused}")
        for (op, reason), nodes in graph.refusals().items():
            lines.append(f"graph {number}, not in the engine: {op}, {len(nodes)} nodes: {reason}")
    return lines


def _graph(number: int, graph: GraphReport) -> list[str]:
    lines = [f"=== graph {number}: {short_line(graph.model)}"]
    facts = {"engine": graph.engine, "cause": short_cause(graph.cause)}
    if graph.variant:
        facts["sizes of 1"] = ", ".join(graph.variant)
    if graph.refused:
        facts["refused"] = graph.refused
    if graph.not_loaded:
        facts["in the cache"] = f"only an entry that differs: {graph.not_loaded}"
    facts["time"] = ", ".join(f"{stage} {duration(s)}" for stage, s in graph.seconds.items()) or "none"
    facts["memory"] = (
        ", ".join(f"{name} {amount(count)}" for name, count in graph.memory.items()) or "not measured"
    )
    lines += table(facts.items(), "  ")
    sections: Sequence[tuple[str, Iterable[str]]] = (
        ("symbols", table(graph.symbols.items())),
        ("guards", graph.guards),
        ("passes", _passes(graph)),
        ("regions", _regions(graph)),
        ("clusters", table(clusters(graph))),
        ("kernels", table((name, f"{count} ×") for name, count in graph.kernels().items())),
        ("refusals", _refusals(graph)),
        ("captured graph", graph.captured.splitlines()),
        ("graph after the passes", graph.lowered.splitlines()),
        ("where each node runs", _placements(graph)),
    )
    for title, content in sections:
        shown = list(content)
        lines += [f"--- {title}", *(f"  {line}" for line in shown)] if shown else []
    return lines


def _passes(graph: GraphReport) -> Iterator[str]:
    idle = dict.fromkeys(report.name for report in graph.passes if not report.edits + report.refused)
    for report in graph.passes:
        if report.name in idle:
            continue
        yield f"{report.name}: {len(report.edits)} edits in {duration(report.seconds)}, {report.nodes} nodes after it"
        for edit in report.edits:
            gone, new = ", ".join(edit.removed) or "nothing", ", ".join(edit.added) or "nothing"
            what = "" if edit.what == report.name else f"{edit.what}: "
            yield f"  {what}{gone} -> {new}"
            if edit.line:
                yield f"    {short_line(edit.line)}"
        for match in report.refused:
            yield f"  refused at {match.node}: {match.reason}"
            if match.line:
                yield f"    {short_line(match.line)}"
    if idle:
        yield f"made no changes: {', '.join(idle)}"


def _regions(graph: GraphReport) -> Iterator[str]:
    for region in graph.regions:
        yield f"{region.name}: {region.nodes} nodes for {region.engine}"
        yield from (f"  {note}" for note in region.notes)


def clusters(graph: GraphReport) -> Iterator[tuple[str, str]]:
    """Yield (key, facts) for each cluster, a group of ops compiled as one. The key is cut to 8 characters."""
    for region in graph.regions:
        for cluster in region.clusters:
            reason = f": {cluster.reason}" if cluster.reason else ""
            took = duration(cluster.seconds)
            facts = f"{cluster.uses} ×, {cluster.nodes} elementary nodes, {cluster.origin} in {took}{reason}"
            yield cluster.key[:8], facts


def _refusals(graph: GraphReport) -> Iterator[str]:
    for (op, reason), nodes in graph.refusals().items():
        yield f"{op}, {len(nodes)} ×: {reason}"
        for line in dict.fromkeys(node.line for node in nodes):
            yield f"  {short_line(line)}"


def _placements(graph: GraphReport) -> list[str]:
    return list(table((node.name, f"{node.op} {node.result}: {node.where}") for node in graph.nodes))


# --- figures for people


def table(rows: Iterable[tuple[str, str]], indent: str = "") -> list[str]:
    all_rows = list(rows)
    width = max((len(name) for name, _ in all_rows), default=0)
    return [textwrap.indent(f"{name:<{width}}  {text}", indent) for name, text in all_rows]


def counts(numbers: dict[str, int]) -> str:
    """Return names with their counts as one text: ``rms_norm 4, rotary 2``."""
    return ", ".join(f"{name} {count}" for name, count in numbers.items()) or "nothing"


def short_line(line: str) -> str:
    """Return a source line "FILE:LINE" without the path to site-packages: it then begins with the package's name."""
    return re.sub(r"/\S*/(?:site|dist)-packages/", "", line)


def short_cause(cause: str) -> str:
    """Return the first line of Dynamo's reason for a compilation. The stack in the other lines is cut off."""
    return cause.strip().partition("\n")[0]


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def amount(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
