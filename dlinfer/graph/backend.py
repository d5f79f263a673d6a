"""The Dynamo backend ``dlinfer``: what torch.compile(model, backend="dlinfer") calls with each graph."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dlinfer.errors import CaptureError, DlinferError, InferenceOnlyError
from dlinfer.graph import observe
from dlinfer.graph.capture.trace import capture
from dlinfer.graph.engine import check_options, find_engine
from dlinfer.graph.ir.device import graph_device
from dlinfer.graph.ir.dialect import STATIC
from dlinfer.graph.lowering.apart import SharedMemoryError
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.lowering.lower import lower, timed
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.policy import leave_graph
from dlinfer.graph.report.report import GraphReport, record
from dlinfer.graph.seam import dynamo


def dlinfer_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | CompileOptions | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's.

    options: see ``dlinfer.graph.options.CompileOptions``. mode: torch.compile's name for a set of inductor's options,
    which callers such as transformers always pass; it has no effect here.

    Every refusal is raised by the compiled function, where the caller of the model meets it as what it is and not
    wrapped by Dynamo: CompileOptionError, InferenceOnlyError, EngineUnavailableError and, under the fallback policy
    ``error``, CaptureError and GraphFallbackError.
    """
    try:
        return _compile(graph_module, example_inputs, CompileOptions.of(options))
    except DlinferError as error:
        return _raises(error)


def _compile(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions
) -> Callable[..., Any]:
    try:
        compiled, _ = compile_graph(graph_module, example_inputs, options)
    except CaptureError as error:
        leave_graph("torch.compile", error, options.policy)
        return graph_module.forward
    return _or_eager(compiled, graph_module, options.policy) if compiled.apart else compiled


def _or_eager(compiled: CompiledGraph, graph_module: fx.GraphModule, policy: str) -> Callable[..., Any]:
    """The compiled graph, and under the fallback policy Dynamo's own for a call whose inputs share memory."""

    def run(*inputs: Any) -> Any:
        try:
            return compiled(*inputs)
        except SharedMemoryError as error:
            leave_graph("torch.compile", error, policy)
        return graph_module.forward(*inputs)

    return run


def compile_graph(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions
) -> tuple[CompiledGraph, GraphReport]:
    """Compile one graph inside Dynamo's call of a backend: (what runs, its report).

    Raises CaptureError, InferenceOnlyError, EngineUnavailableError and, under the policy ``error``,
    GraphFallbackError.
    """
    _refuse_gradients(graph_module, example_inputs)
    engine = find_engine(options.wanted_engine, graph_device(_values(graph_module, example_inputs)).type)
    check_options(engine, options)
    report = record(GraphReport(model="a function", index=-1, engine=engine.name))
    observe.started(report, graph_module)
    report.cause = dynamo.recompilation_cause() or "first call"
    mode = dynamo.dynamo_fake_mode()
    assert mode is not None, "Dynamo calls its backends inside a tracing context"
    try:
        with timed(report, "capture"):
            captured = capture(graph_module, dynamo.fakes_of_inputs(mode, example_inputs), mode)
    except CaptureError as error:
        report.refused = str(error)
        raise
    report.variant = _unit_sizes(captured.graph_module)
    program = lower(captured, engine, options, report)
    observe.finished(report, captured, program)
    return program, report


def _refuse_gradients(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    turns_on = (torch._C._set_grad_enabled, (True,))
    inside = any((node.target, node.args) == turns_on for node in graph_module.graph.nodes)
    if not torch.is_grad_enabled() and not inside:
        return
    for node, value in zip(graph_module.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise InferenceOnlyError(what=node.name)


def _values(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[Any]:
    """What a graph takes, then what it makes: one without inputs runs where its factories put their tensors."""
    yield from example_inputs
    yield from (node.meta.get("example_value") for node in graph_module.graph.nodes)


def _unit_sizes(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """``input[dim]`` for each size of 1 among the inputs that are no parameters: Dynamo made it a constant."""
    return tuple(
        f"{node.name}[{dim}]"
        for node in graph_module.graph.find_nodes(op="placeholder")
        if not node.meta.get(STATIC) and isinstance(node.meta.get("val"), torch.Tensor)
        for dim, size in enumerate(node.meta["val"].shape)
        if isinstance(size, int) and size == 1
    )


def _raises(error: DlinferError) -> Callable[..., Any]:
    def refused(*inputs: Any) -> Any:
        raise error.again()

    return refused
