"""Lower a captured graph: passes, partition, the engine's regions, and the program that joins them."""

from collections.abc import Mapping, Sequence

from torch import fx

from dlinfer.graph.capture.trace import Captured
from dlinfer.graph.engine import CompiledRegion, Engine, compiling
from dlinfer.graph.ir import callee
from dlinfer.graph.ir.dialect import (
    describe,
    fake,
    is_compute,
    is_size,
    is_view,
    model_line,
    op_name,
)
from dlinfer.graph.ir.extract import extract
from dlinfer.graph.ir.flops import flops_of
from dlinfer.graph.ir.global_state import Requirement
from dlinfer.graph.ir.program import Program, Step, refer
from dlinfer.graph.lowering.apart import apart_of
from dlinfer.graph.lowering.compiled import CompiledGraph, resolver
from dlinfer.graph.lowering.kv_layouts import kv_layouts_of
from dlinfer.graph.lowering.partition import Partition, partition
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.passes.pipeline import Pass, PassReport, run_passes
from dlinfer.graph.passes.registry import passes
from dlinfer.graph.report import debug
from dlinfer.graph.report.collect import emit, timed
from dlinfer.graph.report.policy import leave_engine
from dlinfer.graph.report.report import GraphReport, NodeReport, RegionReport
from dlinfer.graph.torch_private.thread_state import run_plain


def lower(captured: Captured, engine: Engine, options: CompileOptions) -> CompiledGraph:
    """Compile a captured graph for ``engine``. Raises GraphFallbackError under the fallback policy ``error``."""
    improve(captured.graph_module, options)
    return place(captured.graph_module, engine, options)


def improve(graph_module: fx.GraphModule, options: CompileOptions) -> None:
    """Run the common passes on the graph in place, except those that the options turn off."""
    emit(lambda report: debug.show_captured(report, graph_module))
    _run(graph_module, passes(), options)


def place(graph_module: fx.GraphModule, engine: Engine, options: CompileOptions) -> CompiledGraph:
    """Compile a graph after the common passes.

    The engine's own passes run, and the engine compiles its regions. Each other node becomes a step that runs eagerly.
    """
    _run(graph_module, engine.passes, options)
    emit(lambda report: debug.show_lowered(report, graph_module))
    with timed("partition"):
        divided = partition(
            graph_module.graph, engine, keep_small=options.keeps_small_regions, eager_ops=options.eager_ops
        )
    for node, reason in divided.refusals.items():
        if node not in divided.by_choice and is_compute(node):
            leave_engine(node, engine.name, reason, options.policy)
    with timed("compile"):
        return _assemble(graph_module, divided, engine, options)


def _run(graph_module: fx.GraphModule, chosen: Sequence[Pass], options: CompileOptions) -> None:
    def show(done: PassReport, _: fx.GraphModule) -> None:
        emit(lambda report: debug.show_pass(report, done))

    with timed("passes"):
        run_passes(graph_module, chosen, disabled=options.disabled_passes, show=show)


def _assemble(
    graph_module: fx.GraphModule, divided: Partition, engine: Engine, options: CompileOptions
) -> CompiledGraph:
    first: list[Step] = []
    steps: list[Step] = []
    placement: dict[str, str] = {}
    parts: dict[str, CompiledRegion] = {}
    for index, part in enumerate(divided.parts):
        if not part.in_engine:
            for node in part.nodes:
                steps += Step.laid_out(node, "eager", callee.reference(node.target))
            continue
        name = f"region_{index}"
        region = extract(graph_module, part.nodes, name)
        first += [Step.of(node, "size", callee.reference(node.target)) for node in region.inserted]
        # Casts are nodes of the graph. So torch ops that an engine calls while it compiles run without autocast.
        with compiling(engine.name, name):
            compiled = parts[name] = run_plain(engine.compile, (region, options))
        placement |= compiled.placement
        divided.refusals |= {
            node: compiled.refused[node.name] for node in part.nodes if node.name in compiled.refused
        }
        outputs = tuple(node.name for node in region.outputs)
        steps.append(Step(outputs, "region", f"region {name}", refer(region.inputs), {}, ""))
    emit(lambda report: _fill(report, graph_module.graph, divided, engine, placement, parts))
    graph, regions = graph_module.graph, {name: compiled.run for name, compiled in parts.items()}
    program = Program.of(graph_module, first + steps, resolver(regions), name="graph")
    requirement, layouts = Requirement.of(graph), kv_layouts_of(graph)
    return CompiledGraph(engine, program, requirement, regions, parts, layouts, apart=apart_of(graph))


def _fill(
    report: GraphReport,
    graph: fx.Graph,
    divided: Partition,
    engine: Engine,
    placement: dict[str, str],
    parts: Mapping[str, CompiledRegion],
) -> None:
    """Write the regions, and where each node runs, into the report."""
    counts = [len(part.nodes) for part in divided.parts if part.in_engine]
    report.regions = [
        RegionReport(name, engine.name, count, part.clusters, part.run.source, part.notes)
        for count, (name, part) in zip(counts, parts.items(), strict=True)
    ]
    calls = (node for node in graph.nodes if node.op == "call_function")
    report.nodes = [_node_report(node, divided, placement) for node in calls]


def _node_report(node: fx.Node, divided: Partition, placement: dict[str, str]) -> NodeReport:
    if node.name in placement:
        place = "engine"
    elif is_size(node):
        place = "size"
    elif is_view(node) or not is_compute(node):
        place = "view"
    else:
        place = "eager" if node in divided.refusals else "engine"
    return NodeReport(
        name=node.name,
        op=op_name(node),
        place=place,
        how=placement.get(node.name, ""),
        reason=divided.refusals.get(node, "") if place == "eager" else "",
        line=model_line(node),
        result=describe(fake(node)),
        reads=tuple(parent.name for parent in node.all_input_nodes),
        flops=flops_of(node),
    )
