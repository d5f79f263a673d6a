"""Render an explanation as one self-contained HTML page: figures, an outline of what runs, and tables."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from dlinfer.explanation.fields import Facts
from dlinfer.explanation.outline import html_of, outline_of
from dlinfer.explanation.text import amount, duration, headline, short_cause, short_line
from dlinfer.graph.report.report import FIRST_CALL, LOADED, GraphReport

_LEGEND = (
    ("cluster", "loops compiled together"),
    ("kernel", "kernel"),
    ("eager", "eager, outside the engine"),
    ("view", "view"),
)


def page_of(explanation: Facts) -> str:
    """Return the page. Everything that comes from a model is escaped; no script, font or image is loaded."""
    template = resources.files("dlinfer.explanation").joinpath("page.html").read_text(encoding="utf-8")
    body = [_head(explanation)]
    body += [
        _graph(number, graph, explanation.kind_of(graph)) for number, graph in enumerate(explanation.graphs)
    ]
    before, _, rest = template.partition("$title")
    between, _, after = rest.partition("$body")
    return "".join((before, escape(explanation.model), between, *body, after))


def _head(explanation: Facts) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in explanation.versions.items())
    facts = "".join(
        f'<div class="fact{" wide" if len(text) > 24 else ""}"><b>{escape(name)}</b>{escape(text)}</div>'
        for name, text in headline(explanation).items()
    )
    parts = [f"<h1>{escape(explanation.model)}</h1>", f'<div class="soft">{escape(versions)}</div>']
    parts.append(f'<div class="facts">{facts}</div>')
    if not explanation.graphs:
        parts.append(_notice("No graph was captured: the model ran without dlinfer."))
    for broken in explanation.graph_breaks:
        often = f", {broken.count} times" if broken.count > 1 else ""
        text = f"<b>Graph break{often}</b> at <code>{escape(short_line(broken.line))}</code>: {escape(broken.reason)}"
        parts.append(_notice(f'{text}<div class="soft">{escape(broken.advice)}</div>'))
    return "\n".join(parts)


def _graph(number: int, graph: GraphReport, kind: str) -> str:
    stages = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in graph.seconds.items())
    parts = [f"<h2>Graph {number}: {escape(short_line(graph.model))}</h2>"]
    parts.append(f'<div class="soft">engine {escape(graph.engine)} · {escape(stages)}</div>')
    if graph.cause not in (FIRST_CALL, LOADED):
        parts.append(_notice(f"<b>{kind.capitalize()}</b>: {escape(short_cause(graph.cause))}", mild=True))
    if graph.refused:
        parts.append(_notice(f"<b>Runs without dlinfer</b>: {escape(graph.refused)}"))
    for (op, reason), nodes in graph.refusals().items():
        lines = _lines(node.line for node in nodes)
        parts.append(
            _notice(f"<b>Not in the engine</b>: {escape(op)}, {len(nodes)} ×: {escape(reason)}{lines}")
        )
    parts += [_outline(graph), *_tables(graph)]
    return "<section>" + "\n".join(parts) + "</section>"


def _outline(graph: GraphReport) -> str:
    if not graph.nodes:
        return ""
    legend = "".join(f'<span class="{kind}">{text}</span>' for kind, text in _LEGEND)
    return f'<div class="legend">{legend}</div><div class="outline">{html_of(outline_of(graph))}</div>'


def _tables(graph: GraphReport) -> Iterable[str]:
    clusters = [
        (c.key[:8], c.uses, c.nodes, c.origin, duration(c.seconds), c.reason)
        for region in graph.regions
        for c in region.clusters
    ]
    regions = [
        (region.name, region.engine, region.nodes, "; ".join(region.notes)) for region in graph.regions
    ]
    passes = [
        (item.name, item.why, len(item.edits), item.nodes, duration(item.seconds)) for item in graph.passes
    ]
    edits = [
        (item.name, edit.what, ", ".join(edit.removed), ", ".join(edit.added), short_line(edit.line))
        for item in graph.passes
        for edit in item.edits
    ]
    refused = [
        (item.name, match.node, match.reason, short_line(match.line))
        for item in graph.passes
        for match in item.refused
    ]
    nodes = [
        (node.name, node.op, node.result, node.where, node.module, short_line(node.line))
        for node in graph.nodes
    ]
    memory = [(name, amount(count)) for name, count in graph.memory.items()]
    symbols = [(name, *_split(text)) for name, text in graph.symbols.items()]
    inputs = [(item.name, item.result, "weight" if item.weight else "") for item in graph.inputs]
    yield _table("Passes", ("pass", "why", "edits", "nodes after", "time"), passes)
    yield _table("Edits", ("pass", "what", "removed", "added", "model line"), edits)
    yield _table("Refused matches", ("rule", "node", "reason", "model line"), refused)
    yield _table("Regions", ("region", "engine", "nodes", "notes"), regions)
    yield _table("Clusters", ("cluster", "uses", "elementary nodes", "origin", "time", "reason"), clusters)
    yield _table("Kernels", ("kernel", "how often"), list(graph.kernels().items()))
    yield _table("Symbols", ("symbol", "values", "from"), symbols)
    yield _table("Guards", ("condition, and the line that needs it",), [(text,) for text in graph.guards])
    yield _table("Memory", ("what", "size"), memory)
    yield _table("Inputs", ("input", "dtype and sizes", ""), inputs)
    yield _table("Nodes", ("node", "op", "result", "runs as", "module", "model line"), nodes)
    for title, text in (("Captured graph", graph.captured), ("Graph after the passes", graph.lowered)):
        if text:
            yield f'<details><summary>{title}</summary><pre class="graph">{escape(text)}</pre></details>'


def _split(symbol: str) -> tuple[str, str]:
    values, _, source = symbol.partition(", ")
    return values, source


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return (
        f"<details><summary>{escape(title)} <span class=soft>({len(rows)})</span></summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f'<td class="number">{value}</td>'
    return f"<td>{escape(str(value))}</td>"


def _lines(lines: Iterable[str]) -> str:
    shown = list(dict.fromkeys(short_line(line) for line in lines if line))
    return "".join(f"<div><code>{escape(line)}</code></div>" for line in shown)


def _notice(content: str, *, mild: bool = False) -> str:
    return f'<div class="notice{" mild" if mild else ""}">{content}</div>'
