"""The backend ``dlinfer`` of torch.compile. Dynamo calls ``dlinfer_backend`` for each graph of a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from dlinfer.errors import CaptureError, CompileOptionError, DlinferError, InferenceOnlyError
from dlinfer.graph import observe
from dlinfer.graph.capture.trace import capture
from dlinfer.graph.engine import check_options, find_engine
from dlinfer.graph.ir.conj_neg import lazy_inputs, refuse_shared, with_resolved
from dlinfer.graph.ir.device import graph_device
from dlinfer.graph.lowering.apart import SharedMemoryError
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.lowering.lower import lower
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.collect import collecting, emit, timed
from dlinfer.graph.report.policy import leave_graph
from dlinfer.graph.report.report import FIRST_CALL, GraphReport, record
from dlinfer.graph.torch_private import dynamo

Compiled = Callable[..., object]
"""The function that Dynamo calls in place of a graph."""


def dlinfer_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, object] | CompileOptions | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile a Dynamo graph and return the compiled function.

    options: the options of the compilation (``CompileOptions``).
    mode: None, ``default`` or ``reduce-overhead``. It has no effect, and is accepted because transformers always passes
        ``reduce-overhead``.

    Dynamo would wrap an error that its backend raises. So the backend returns a function that raises the error at each
    call. The errors are CompileOptionError, InferenceOnlyError, EngineUnavailableError and, under the fallback policy
    ``error``, CaptureError and GraphFallbackError.
    """
    try:
        if mode not in (None, "default", "reduce-overhead"):
            expected = "'default' or 'reduce-overhead'; pass dlinfer's own options as options={...}"
            raise CompileOptionError(option="mode", given=mode, expected=expected)
        chosen = CompileOptions.of(options)
        try:
            compiled, _, _ = compile_graph(graph_module, example_inputs, chosen)
        except CaptureError as error:
            leave_graph("torch.compile", error, chosen.policy)
            return graph_module.forward
    except DlinferError as error:
        return _raises(error)
    return _or_eager(compiled, graph_module, chosen.policy) if compiled.apart else compiled


def _or_eager(compiled: CompiledGraph, graph_module: fx.GraphModule, policy: str) -> Compiled:
    """Return a function that runs ``compiled``, or runs ``graph_module`` eagerly if the call's inputs share memory.

    Under the fallback policy ``error``, a call whose inputs share memory raises SharedMemoryError.
    """

    def run(*inputs: object) -> object:
        try:
            return compiled(*inputs)
        except SharedMemoryError as error:
            leave_graph("torch.compile", error, policy)
        return graph_module.forward(*inputs)

    return run


def compile_graph(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[object],
    options: CompileOptions,
    *,
    keep_floats: bool = True,
) -> tuple[CompiledGraph, fx.Graph, GraphReport]:
    """Compile a graph for Dynamo. Return the compiled graph, the fx graph after the passes, and the report.

    keep_floats: whether Python floats that change between calls become inputs of the graph; see ``capture``.
    Raises CaptureError, InferenceOnlyError, CompileOptionError, EngineUnavailableError and, under the fallback policy
    ``error``, GraphFallbackError.
    """
    _refuse_gradients(graph_module, example_inputs)
    engine = find_engine(options.wanted_engine, graph_device(_values(graph_module, example_inputs)).type)
    check_options(engine, options)
    report = record(GraphReport("a function", -1, engine.name, dynamo.recompilation_cause() or FIRST_CALL))
    mode = dynamo.dynamo_fake_mode()
    assert mode is not None, "Dynamo calls its backends inside a tracing context"
    lazy = lazy_inputs(example_inputs)
    with collecting(report):
        emit(lambda report: observe.started(report, graph_module))
        try:
            with timed("capture"):
                fakes = with_resolved(dynamo.fakes_of_inputs(mode, example_inputs), lazy)
                captured = capture(graph_module, fakes, mode, keep_floats=keep_floats)
                if lazy:
                    refuse_shared(captured.graph_module.graph, lazy)
            compiled = lower(captured, engine, options)
        except CaptureError as error:
            report.refused = str(error)
            raise
        compiled.resolved = lazy
        emit(lambda report: observe.finished(report, captured, compiled))
    return compiled, captured.graph_module.graph, report


def _refuse_gradients(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> None:
    """Raise InferenceOnlyError if an op of the graph would record gradients.

    Ops under ``no_grad`` or inference mode record no gradients.
    """
    records, before = torch.is_grad_enabled(), dict[fx.Node, bool]()
    for node in graph_module.graph.nodes:
        if node.target is dynamo.SET_GRAD_ENABLED:
            records = bool(node.args[0])
        elif getattr(node.target, "__name__", "") == "_enter_inference_mode":
            before[node], records = records, records and not node.args[0]
        elif getattr(node.target, "__name__", "") == "_exit_inference_mode":
            records = before[node.args[0]]
        elif records and node.op != "placeholder" and _requires_grad(node.meta.get("example_value")):
            inputs = zip(dynamo.input_sources(graph_module.graph), example_inputs, strict=True)
            names = (dynamo.name_in_module(source) for source, value in inputs if _requires_grad(value))
            raise InferenceOnlyError(what=next(names, "") or node.name)


def _requires_grad(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(value))


def _values(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> Iterator[object]:
    """Yield the values that show the graph's device: the example inputs, and the example result of each node."""
    yield from example_inputs
    yield from (node.meta.get("example_value") for node in graph_module.graph.nodes)


def _raises(error: DlinferError) -> Compiled:
    def refused(*inputs: object) -> NoReturn:
        raise error.again()

    return refused
