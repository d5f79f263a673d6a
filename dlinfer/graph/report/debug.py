"""What ``DLINFER_DEBUG`` prints while graphs are compiled, and graphs as text."""

import sys

import torch
from torch import fx

from dlinfer import settings
from dlinfer.graph.ir.dialect import fake, op_name
from dlinfer.graph.passes.pipeline import PassReport
from dlinfer.graph.report.report import GraphReport


def wanted(topic: str) -> bool:
    """Whether DLINFER_DEBUG names a topic. Raises SettingError where it names one that does not exist."""
    asked = {word.strip() for word in settings.current().debug.split(",")}
    return topic in asked or "all" in asked


def show(topic: str, title: str, text: str) -> None:
    """Print to stderr when the topic is asked for."""
    if wanted(topic):
        print(f"dlinfer {topic}: {title}\n{text}", file=sys.stderr)


def show_pass(report: PassReport, graph_module: fx.GraphModule) -> None:
    """Print a pass's edits where it made any."""
    if not wanted("passes") or not report.edits:
        return
    edits = "\n".join(
        f"  {edit.what}: {', '.join(edit.removed)} -> {', '.join(edit.added) or 'nothing'}  {edit.line}"
        for edit in report.edits
    )
    show("passes", f"{report.name}, {len(report.edits)} edits in {report.seconds * 1e3:.1f} ms", edits)


def show_placement(report: GraphReport) -> None:
    """Print where each node that computes runs."""
    if not wanted("placement"):
        return
    nodes = [node for node in report.nodes if node.place in ("engine", "eager")]
    lines = [f"  {node.name}: {node.op} {node.result}: {node.where}  {node.line}" for node in nodes]
    show("placement", report.model, "\n".join(lines))


def text_of(graph_module: fx.GraphModule) -> str:
    """A graph as text, a node a line: its name, its result, what it calls with what."""
    lines = []
    for node in graph_module.graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
            continue
        arguments = [str(item) for item in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
        call = "input" if node.op == "placeholder" else f"{op_name(node)}({', '.join(arguments)})"
        if node.op == "get_attr":
            call = f"constant {node.target}"
        lines.append(f"{node.name}: {shown(fake(node))} = {call}")
    return "\n".join(lines)


def shown(value: object) -> str:
    """A fake result for people: dtype and sizes."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(shown, value)) + ")"
    return str(value)
