"""Ahead of time: ``dlinfer.compile`` takes a module, or what torch.export made of one, through the same passes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram

from dlinfer.errors import CaptureError
from dlinfer.graph.artifact import Artifact, TensorSpec
from dlinfer.graph.call_inputs import Assumption, root
from dlinfer.graph.capture import Captured
from dlinfer.graph.dialect import STATIC
from dlinfer.graph.engine import check_options, find_engine
from dlinfer.graph.fusion.layout import fits
from dlinfer.graph.lower import lower, timed
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report import GraphReport, record
from dlinfer.graph.torch_seam import (
    conditions,
    export_gives_results_only,
    export_kinds,
    fixed_size,
    mode_of,
    size_range,
    symbol_ranges,
)


def compile(
    module: torch.nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    engine: str | None = None,
    options: Mapping[str, Any] | CompileOptions | None = None,
) -> Artifact:
    """Compile a module ahead of time.

    module: a module, in the mode (eval, train) that it is to be compiled in, or an ExportedProgram.
    args, kwargs: an example call; not needed for an ExportedProgram.
    dynamic_shapes: which sizes may change, as torch.export takes it.
    engine: name of the graph engine; overrides the option.
    options: as for ``torch.compile(backend="dlinfer", options=...)``.

    Returns an Artifact, callable like the module for inference; it shares the module's weights.
    Raises CaptureError where torch.export cannot capture the module, CompileOptionError, EngineUnavailableError
    and, under the fallback policy ``error``, GraphFallbackError.
    """
    chosen = CompileOptions.of(options)
    if engine is not None:
        chosen = replace(chosen, engine=engine)
    name = type(module).__name__
    report = GraphReport(model=name, index=-1, engine="", cause="dlinfer.compile")
    with timed(report, "capture"):
        exported = (
            module if isinstance(module, ExportedProgram) else _export(module, args, kwargs, dynamic_shapes)
        )
    captured, weights, inputs = _captured(exported)
    device = next((spec.device.type for spec in inputs if isinstance(spec, TensorSpec)), "cpu")
    found = find_engine(chosen.wanted_engine, device)
    check_options(found, chosen)
    report.engine = found.name
    report.symbols = symbol_ranges(captured.fakes)
    record(report)
    run = lower(captured, found, chosen, report)
    spec = exported.call_spec
    assert spec.in_spec is not None and spec.out_spec is not None
    assumptions = _assumptions(captured, inputs)
    return Artifact(run, weights, inputs, assumptions, spec.in_spec, spec.out_spec, report)


def _export(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    try:
        with torch.no_grad():
            return torch.export.export(module, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    except Exception as cause:  # export raises many classes; the reason is what the user needs
        first = str(cause).strip().splitlines()[0] if str(cause).strip() else ""
        raise CaptureError(
            reason=f"torch.export: {type(cause).__name__}: {first}", line=type(module).__name__
        ) from cause


def _captured(exported: ExportedProgram) -> tuple[Captured, list[torch.Tensor], list[Any]]:
    """(the graph, tensors of its first inputs, specs of the inputs that the caller passes).

    torch.export's graph is in the dialect already: ATen before dispatch, writes in place, weights as inputs.
    """
    if not export_gives_results_only(exported):
        raise CaptureError(
            reason="its writes are outputs of the graph, as run_decompositions makes them",
            line="ExportedProgram",
        )
    graph_module = torch.fx.GraphModule(exported.graph_module, _copied(exported.graph))
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    weights: list[torch.Tensor] = []
    inputs: list[Any] = []
    for node, (kind, target, constant) in zip(placeholders, export_kinds(exported), strict=True):
        if kind == "user":
            inputs.append(_spec(node, constant))
        else:
            node.meta[STATIC] = True
            held: Any = exported.state_dict if target in exported.state_dict else exported.constants
            weights.append(held[target])
    fakes = [node.meta["val"] for node in placeholders]
    return Captured(graph_module, tuple(fakes), mode_of(fakes)), weights, inputs


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph that the passes may change; the caller's ExportedProgram keeps its own."""
    copy = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
    return copy


def _spec(node: torch.fx.Node, constant: Any) -> Any:
    fake = node.meta["val"]
    if not isinstance(fake, torch.Tensor):
        return constant
    sizes = tuple(size_range(size) for size in fake.shape)
    if fits(fake, None):
        return TensorSpec(node.name, fake.dtype, fake.device, sizes)
    strides = tuple(number for stride in fake.stride() if (number := fixed_size(stride)) is not None)
    if len(strides) < fake.dim():
        reason = f"input {node.name} is neither contiguous nor of fixed strides"
        raise CaptureError(reason=reason, line="torch.export")
    return TensorSpec(node.name, fake.dtype, fake.device, sizes, strides)


def _assumptions(captured: Captured, inputs: list[Any]) -> list[Assumption]:
    """What the caller's tensors must satisfy together: torch.export's program itself checks it, ours must too."""
    names = {spec.name for spec in inputs if isinstance(spec, TensorSpec)}
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    sources = [(f"L['{node.name}']", node.meta["val"]) for node in placeholders if node.name in names]
    found = [Assumption(*one) for one in conditions(captured.mode, sources)]
    for assumption in found:
        if not {root(source) for source in assumption.sources} <= names:
            raise CaptureError(reason=f"it holds only while {assumption}", line="torch.export")
    return found
