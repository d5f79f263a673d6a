"""From a stage as it lies in a file to one that runs: its signature, its graph, its engine, its weights."""

from dataclasses import dataclass, replace
from typing import Any

from dlinfer.errors import ArtifactCorruptError
from dlinfer.graph.codec.arguments import CodecError, refuse_malformed
from dlinfer.graph.codec.graph import ReadGraph, read_graph
from dlinfer.graph.engine import (
    Engine,
    check_options,
    find_engine,
)
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.lowering.lower import place
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.collect import collecting
from dlinfer.graph.report.report import LOADED, GraphReport, record
from dlinfer.graph.torch_private.thread_state import run_plain
from dlinfer.runtime.artifact.files import ReadArtifact, ReadStage
from dlinfer.runtime.options import SessionOptions


@dataclass(frozen=True)
class Plan:
    """The inputs of a stage, without its weights, and its results.

    results: for each result of the graph, its output of the interface; None for one that is no tensor.
    names: what each result is called.
    """

    interface: Interface
    results: tuple[int | None, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class LoadedStage:
    """A stage that runs: called with the weights and the leaves of its plan, it gives the results.

    numbers: its weights in the artifact; written: those of them that the graph writes.
    concurrent: whether threads may run it at once.
    """

    plan: Plan
    engine: Engine
    run: CompiledGraph
    numbers: tuple[int, ...]
    written: frozenset[int]
    report: GraphReport
    concurrent: bool


def plan_of(artifact: ReadArtifact, stage: ReadStage) -> Plan:
    """Return what a stage takes and gives. Raises ArtifactCorruptError."""
    inputs = [port.name for port in stage.interface.inputs]
    outputs = {port.name: number for number, port in enumerate(stage.interface.outputs)}
    results = tuple(map(outputs.get, stage.results))
    if len(set(inputs)) < len(inputs) or len(set(stage.results)) < len(results):
        raise ArtifactCorruptError(source=artifact.source, detail="two inputs or outputs of one name")
    if [number for number in results if number is not None] != list(range(len(stage.interface.outputs))):
        raise ArtifactCorruptError(source=artifact.source, detail="its outputs are not among its results")
    return Plan(stage.interface, results, stage.results)


# --- making it run


def load_stage(artifact: ReadArtifact, stage: ReadStage, plan: Plan, options: SessionOptions) -> LoadedStage:
    """Lower the stored graph through its engine.

    Raises ArtifactCorruptError, EngineUnavailableError,
    CompileOptionError for options that the engine does not have, TorchStateChangedError for a graph that reads another
    default dtype and, under the fallback policy ``error``, GraphFallbackError.
    """
    return run_plain(_load_stage, (artifact, stage, plan, options))


def _load_stage(artifact: ReadArtifact, stage: ReadStage, plan: Plan, options: SessionOptions) -> LoadedStage:
    stage.requirement.check_default_dtype()
    read = read_stage(artifact, stage, options)
    # The session knows outputs by these very ports.
    plan = replace(plan, interface=replace(read.interface, outputs=plan.interface.outputs))
    engine = find_engine(options.engine or stage.engine, "")
    report = GraphReport(model=stage.model, index=-1, engine=engine.name, cause=LOADED)
    record(report)
    compile_options = CompileOptions(
        engine=engine.name,
        fallback=options.fallback,
        small_regions="engine" if stage.small_regions else "eager",
        cache_dir=options.cache_dir,
        engine_options=_engine_options(stage, engine, options),
    )
    check_options(engine, compile_options)
    graph_module = read.captured.graph_module
    with collecting(report):
        run = place(graph_module, engine, compile_options)
    written = frozenset(stage.tensors[number] for number in read.writes)
    concurrent = engine.concurrent and not written
    weights = stage.tensors[: stage.graph["weights"]]
    return LoadedStage(plan, engine, run, weights, written, report, concurrent)


def _engine_options(stage: ReadStage, engine: Engine, options: SessionOptions) -> dict[str, Any]:
    """The session's options over those of the artifact that the engine lets a file store."""
    of_its_own = stage.engine_options if engine.name == stage.engine else {}
    kept = {name: value for name, value in of_its_own.items() if name in engine.stored_options}
    return kept | dict(options.engine_options)


def read_stage(artifact: ReadArtifact, stage: ReadStage, options: SessionOptions) -> ReadGraph:
    """Return the graph of a stage, every op tried on fakes. Raises ArtifactCorruptError."""
    try:
        with refuse_malformed():
            numbers = range(stage.graph["weights"], len(stage.tensors))
            constants = {number: artifact.tensors.tensor(stage.tensors[number]) for number in numbers}
            arguments = stage.graph, artifact.layouts(stage), constants, options.allow_ops
            read = run_plain(read_graph, arguments)
            if not read.writes.isdisjoint(constants):
                raise CodecError("it writes a constant")
            results: Any = read.captured.graph_module.graph.output_node().args[0]
            if len(results) != len(stage.results):
                raise CodecError(f"it does not give {len(stage.results)} results")
    except CodecError as cause:
        detail = f"the graph of entry {stage.entry!r}: {cause}"
        raise ArtifactCorruptError(source=artifact.source, detail=detail) from cause
    return read
