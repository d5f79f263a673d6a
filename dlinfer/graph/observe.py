"""Facts about a compilation for its report: name, guards, modules, memory."""

import re
import resource
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from dlinfer.graph.capture.trace import Captured
from dlinfer.graph.ir.dialect import STATIC, describe, fake, stack_frames, storages
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.ir.program import Program
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.report import debug
from dlinfer.graph.report.report import GraphReport, InputReport
from dlinfer.graph.torch_private import symbol_guards, symbols
from dlinfer.graph.torch_private.fake_mode import storage_id


def started(report: GraphReport, dynamo_graph: fx.GraphModule) -> None:
    """Write into ``report`` the name of the compiled function, and the process's peak memory before the compilation."""
    report.model = _function_of(dynamo_graph.graph) or report.model
    report.memory["peak before"] = peak_memory()


def finished(report: GraphReport, captured: Captured, compiled: CompiledGraph) -> None:
    """Write the facts of a finished compilation into ``report``. DLINFER_DEBUG prints where each node runs."""
    graph = captured.graph_module.graph
    report.guards = symbol_guards.shape_guards(captured.mode)
    report.symbols = symbols.sized_symbols(captured.mode)
    placeholders = graph.find_nodes(op="placeholder")
    written = effects_of(graph).is_written
    report.inputs = [
        InputReport(
            node.name,
            describe(fake(node)),
            # The graph writes a static KV cache, so it is no weight, although it is the same tensor at each call.
            bool(node.meta.get(STATIC)) and not written(node),
            tuple(map(str, fake(node).shape)) if isinstance(fake(node), torch.Tensor) else (),
            written(node),
        )
        for node in placeholders
    ]
    report.variant = tuple(  # Dynamo specializes on each size of 1
        f"{node.name}[{dim}]"
        for node, item in zip(placeholders, report.inputs, strict=True)
        if not node.meta.get(STATIC)
        for dim, size in enumerate(item.sizes)
        if size == "1"
    )
    report.outputs = tuple(node.name for node in graph.output_node().all_input_nodes)
    modules = {node.name: module_of(node) for node in graph.nodes}
    for node in report.nodes:
        node.module = modules.get(node.name, "")
    weights = [node for node, item in zip(placeholders, report.inputs, strict=True) if item.weight]
    report.memory["weights"] = _bytes_behind(weights)
    report.memory["written inputs"] = _bytes_behind(filter(written, placeholders))
    report.memory["held"] = held_bytes(compiled)
    report.memory["peak after"] = peak_memory()
    debug.show_placement(report)


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes, without the compilers that it starts."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost module that created a node, such as ``layers.0.mlp``; empty for the root."""
    stack: Mapping[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {"": ("", None)}
    path, _ = list(stack.values())[-1]
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path)


def held_bytes(compiled: CompiledGraph) -> int:
    """Return the size in bytes of the constants in the programs of a compiled graph."""
    programs = [run for run in (compiled.program, *compiled.regions.values()) if isinstance(run, Program)]
    constants: list[object] = [value for program in programs for value in program.constants.values()]
    # A branch of torch.cond is no tensor.
    tensors = [value for value in constants if isinstance(value, torch.Tensor)]
    return sum({storage_id(value): value.untyped_storage().nbytes() for value in tensors}.values())


def _bytes_behind(nodes: Iterable[fx.Node]) -> int:
    sizes = {
        identity: symbols.example_number(fake(node).untyped_storage().nbytes())
        for node in nodes
        for identity in storages(node)
    }
    return sum(sizes.values())


def _function_of(graph: fx.Graph) -> str:
    """Return the outermost function that a graph was traced from, as ``function (file:line)``; empty if unknown."""
    for node in graph.nodes:
        if frames := stack_frames(node):
            path, line, function = frames[0]
            return f"{function} ({path}:{line})"
    return ""
