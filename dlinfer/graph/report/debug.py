"""Graphs as text, and the output of ``DLINFER_DEBUG`` while graphs are compiled."""

import json

from torch import fx

from dlinfer.graph.debug import show, wanted
from dlinfer.graph.ir.dialect import describe, fake, op_name
from dlinfer.graph.passes.pipeline import PassReport
from dlinfer.graph.report.report import GraphReport
from dlinfer.graph.torch_private.structured_log import log_artifact


def show_captured(report: GraphReport, graph_module: fx.GraphModule) -> None:
    """Write the captured graph as text into the report and torch's log; print it for ``DLINFER_DEBUG=graph``."""
    report.captured = text_of(graph_module)
    show("graph", "captured", report.captured)
    log_artifact("dlinfer_captured", lambda: report.captured)


def show_lowered(report: GraphReport, graph_module: fx.GraphModule) -> None:
    """Write the graph after the passes as text into the report and torch's log."""
    report.lowered = text_of(graph_module)
    log_artifact("dlinfer_after_passes", lambda: report.lowered)


def show_pass(report: GraphReport, done: PassReport) -> None:
    """Add a pass to the report. For ``DLINFER_DEBUG=passes``, print its edits and the matches that it refused."""
    report.passes.append(done)
    if not wanted("passes") or not (done.edits or done.refused):
        return
    lines = [
        f"  {edit.what}: {', '.join(edit.removed)} -> {', '.join(edit.added) or 'nothing'}  {edit.line}"
        for edit in done.edits
    ]
    lines += [f"  refused at {match.node}: {match.reason}  {match.line}" for match in done.refused]
    show("passes", f"{done.name}, {len(done.edits)} edits in {done.seconds * 1e3:.1f} ms", "\n".join(lines))


def show_placement(report: GraphReport) -> None:
    """Log the report for tlparse. For ``DLINFER_DEBUG=placement``, print the place of each node that computes."""
    log_artifact("dlinfer_report", lambda: json.dumps(report.to_dict(), indent=1))
    if not wanted("placement"):
        return
    nodes = [node for node in report.nodes if node.place in ("engine", "eager")]
    lines = [f"  {node.name}: {node.op} {node.result}: {node.where}  {node.line}" for node in nodes]
    show("placement", report.model, "\n".join(lines))


def text_of(graph_module: fx.GraphModule) -> str:
    """Return a graph as text, with a line for each node: its name, its result, its op and the arguments."""
    lines: list[str] = []
    for node in graph_module.graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
            continue
        arguments = [str(item) for item in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
        call = "input" if node.op == "placeholder" else f"{op_name(node)}({', '.join(arguments)})"
        if node.op == "get_attr":
            call = f"constant {node.target}"
        lines.append(f"{node.name}: {describe(fake(node))} = {call}")
    return "\n".join(lines)
