"""From a stage as it lies in a file to one that runs: its signature, its graph, its engine, its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dlinfer.errors import (
    ArtifactCorruptError,
    ArtifactEngineError,
    ArtifactVersionError,
    DlinferError,
)
from dlinfer.graph.codec.arguments import CodecError, decode, device_of, dtype_of, name_of
from dlinfer.graph.codec.graph import ReadGraph, read_graph
from dlinfer.graph.engine import (
    Engine,
    check_options,
    find_engine,
)
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port, Range, bounds_of
from dlinfer.graph.ir.device import HOST
from dlinfer.graph.ir.dialect import STATIC
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.lowering.lower import place
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.collect import collecting
from dlinfer.graph.report.report import LOADED, GraphReport, record
from dlinfer.graph.torch_private.expressions import SizeTextError, parse_condition, parse_size
from dlinfer.graph.torch_private.thread_state import run_plain
from dlinfer.runtime.artifact.files import ReadArtifact, ReadStage
from dlinfer.runtime.options import SessionOptions


@dataclass(frozen=True)
class Plan:
    """What a stage takes behind its weights, and what it gives.

    results: for each result of the graph, its output of the interface; None for one that is no tensor.
    names: what each result is called; None for one that a file of an earlier dlinfer has no name for.
    """

    interface: Interface
    results: tuple[int | None, ...]
    names: tuple[str | None, ...]


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
    """Return the signature of a stage from what the file says. Raises ArtifactCorruptError."""
    try:
        return _plan(stage)
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        detail = f"a graph's signature is not one: {_said(cause)}"
        raise ArtifactCorruptError(source=artifact.source, detail=detail) from cause


def _said(cause: Exception) -> str:
    ours = isinstance(cause, (CodecError, SizeTextError))
    return str(cause) if ours else f"{type(cause).__name__}: {cause}"


def _plan(stage: ReadStage) -> Plan:
    symbols = {name_of(item["name"]): _range(item) for item in stage.graph["symbols"]}
    leaves = [item for item in stage.graph["inputs"] if "weight" not in item]
    inputs = [_input(item, symbols) for item in leaves if "fixed" not in item]
    constants = {place: decode(item["fixed"], {}) for place, item in enumerate(leaves) if "fixed" in item}
    tensors = [item is not None and "dtype" in item for item in stage.outputs]
    outputs = [
        _output(item, symbols)
        for item, is_tensor in zip(stage.outputs, tensors, strict=True)
        if item is not None and is_tensor
    ]
    results_named = tuple(None if item is None else name_of(item["name"]) for item in stage.outputs)
    for names in ([port.name for port in inputs], list(filter(None, results_named))):
        if len(set(names)) < len(names):
            raise CodecError("two inputs or outputs of one name")
    plain = {size.symbol for port in inputs for size in port.sizes if size is not None}
    if not set(symbols) <= plain:
        raise CodecError(f"no input has the size {min(set(symbols) - plain)} itself")
    conditions = tuple(map(parse_condition, stage.graph["conditions"]))
    if not all(name in symbols for one in conditions for name in one.symbols):
        raise CodecError("a condition on an unknown size")
    numbers = iter(range(len(outputs)))
    results = tuple(next(numbers) if is_tensor else None for is_tensor in tensors)
    examples = {item["name"]: item["hint"] for item in stage.graph["symbols"] if type(item["hint"]) is int}
    interface = Interface(tuple(inputs), tuple(outputs), symbols, conditions, constants, examples)
    return Plan(interface, results, results_named)


def _range(item: Any) -> Range:
    low, high = item["low"], item["high"]
    if type(low) is not int or not (high is None or type(high) is int):
        raise CodecError("a range that is not of integers")
    return low, high


def _input(item: Any, symbols: Mapping[str, Range]) -> Port:
    name = name_of(item.get("called", item["name"]))
    if "number" in item:
        value = parse_size(item["number"])
        return Port(name, torch.int64, (value,), bounds_of([value], symbols), torch.device(HOST), number=True)
    sizes = [parse_size(text) for text in item["sizes"]]
    strides = item.get("strides")
    return Port(
        name,
        dtype_of(item["dtype"]),
        tuple(sizes),
        bounds_of(sizes, symbols),
        device_of(item["device"]),
        None if strides is None else tuple(map(parse_size, strides)),
    )


def _output(item: Any, symbols: Mapping[str, Range]) -> Port:
    sizes = [None if text is None else parse_size(text) for text in item["sizes"]]
    bounds = bounds_of(sizes, symbols)
    return Port(
        name_of(item["name"]), dtype_of(item["dtype"]), tuple(sizes), bounds, device_of(item["device"])
    )


# --- making it run


def load_stage(artifact: ReadArtifact, stage: ReadStage, plan: Plan, options: SessionOptions) -> LoadedStage:
    """Lower the stored graph through its engine, or restore what the engine kept of it.

    Raises ArtifactCorruptError, ArtifactEngineError, ArtifactVersionError, EngineUnavailableError,
    CompileOptionError for options that the engine does not have, TorchStateChangedError for a graph that reads another
    default dtype and, under the fallback policy ``error``, GraphFallbackError.
    """
    return run_plain(_load_stage, (artifact, stage, plan, options))


def _load_stage(artifact: ReadArtifact, stage: ReadStage, plan: Plan, options: SessionOptions) -> LoadedStage:
    if stage.requirement is not None:
        stage.requirement.check_default_dtype()
    read = read_stage(artifact, stage, options)
    plan = _completed(plan, read)
    if options.engine not in (None, stage.engine) and stage.payloads:
        given = f"engine {options.engine!r}"
        raise ArtifactEngineError(source=artifact.source, wanted=f"engine {stage.engine!r}", given=given)
    engine = find_engine(options.engine or stage.engine, "")
    if stage.payloads:
        _check_version(artifact, stage, engine)
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
        run = _placed(artifact, stage, engine, compile_options, graph_module)
    if stage.payloads and stage.requirement is not None:
        run.requirement = stage.requirement  # what the engine kept was compiled under these settings
    written = frozenset(stage.tensors[number] for number in read.writes)
    concurrent = engine.concurrent and not written
    weights = sum("weight" in item for item in stage.graph["inputs"])
    return LoadedStage(plan, engine, run, stage.tensors[:weights], written, report, concurrent)


def _engine_options(stage: ReadStage, engine: Engine, options: SessionOptions) -> dict[str, Any]:
    """The session's over the artifact's, of which only those count that are meant to be kept in a file."""
    of_its_own = stage.engine_options if engine.name == stage.engine else {}
    kept = {name: value for name, value in of_its_own.items() if name in engine.stored_options}
    return kept | dict(options.engine_options)


def _placed(
    artifact: ReadArtifact,
    stage: ReadStage,
    engine: Engine,
    options: CompileOptions,
    graph_module: torch.fx.GraphModule,
) -> CompiledGraph:
    if not stage.payloads:
        return place(graph_module, engine, options)
    try:
        return place(graph_module, engine, options, stage.payloads)
    except DlinferError:
        raise
    except Exception as cause:  # an engine judges its own payload, by whatever its SDK raises
        detail = f"engine {engine.name!r} does not take its payload: {type(cause).__name__}: {cause}"
        raise ArtifactCorruptError(source=artifact.source, detail=detail) from cause


def read_stage(artifact: ReadArtifact, stage: ReadStage, options: SessionOptions) -> ReadGraph:
    """Return the graph of a stage, every op tried on fakes. Raises ArtifactCorruptError."""
    weights = sum("weight" in item for item in stage.graph["inputs"])
    constants = {
        number: artifact.tensors.tensor(stage.tensors[number])
        for number in range(weights, len(stage.tensors))
    }
    try:
        read = run_plain(read_graph, (stage.graph, artifact.layouts(stage), constants, options.allow_ops))
        _check(read, weights, len(stage.outputs))
    except CodecError as cause:
        detail = f"the graph of entry {stage.entry!r}: {cause}"
        raise ArtifactCorruptError(source=artifact.source, detail=detail) from cause
    return read


def _check(read: ReadGraph, weights: int, outputs: int) -> None:
    """A graph is called with its weights in order, before all else, and gives what the stage says."""
    order = [item.get("weight") for item in read.inputs]
    if order != [*range(weights), *[None] * (len(order) - weights)]:
        raise CodecError("its weights are not in their order")
    if any(number >= weights for number in read.writes):
        raise CodecError("it writes a constant")
    if len(read.captured.graph_module.graph.output_node().args[0]) != outputs:  # pyright: ignore[reportArgumentType]
        raise CodecError(f"it does not give {outputs} results")


def _completed(plan: Plan, read: ReadGraph) -> Plan:
    """The plan with what the graph itself tells: its conditions, and which inputs it writes."""
    graph, interface = read.captured.graph_module.graph, plan.interface
    effects = effects_of(graph)
    leaves = [node for node in graph.find_nodes(op="placeholder") if not node.meta.get(STATIC)]
    nodes = [node for place, node in enumerate(leaves) if place not in interface.constants]
    inputs = tuple(
        replace(port, written=effects.is_written(node))
        for node, port in zip(nodes, interface.inputs, strict=True)
    )
    return replace(plan, interface=replace(interface, inputs=inputs, conditions=tuple(read.conditions)))


def _check_version(artifact: ReadArtifact, stage: ReadStage, engine: Engine) -> None:
    here = engine.payload_version()
    if not here:
        wanted = f"an engine {engine.name!r} that keeps compiled regions"
        raise ArtifactEngineError(source=artifact.source, wanted=wanted, given="one that does not")
    if here != stage.engine_version:
        raise ArtifactVersionError(
            source=artifact.source,
            what=f"engine {engine.name!r}",
            wanted=stage.engine_version,
            here=here,
        )
