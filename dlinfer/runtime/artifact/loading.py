"""Load a stage: read its graph from an artifact file, and let its engine compile it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from dlinfer.errors import ArtifactCorruptError
from dlinfer.graph.codec.arguments import CodecError, refuse_malformed
from dlinfer.graph.codec.graph import ReadGraph, read_graph
from dlinfer.graph.engine import check_options, find_engine
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.lowering.lower import place
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.collect import collecting
from dlinfer.graph.report.report import LOADED, GraphReport, record
from dlinfer.graph.torch_private.symbols import plain_symbol
from dlinfer.graph.torch_private.thread_state import run_plain
from dlinfer.runtime.artifact.files import ReadArtifact
from dlinfer.runtime.artifact.stage import Stage, with_guards
from dlinfer.runtime.options import SessionOptions


@dataclass
class LoadedStage:
    """A stage, which can run once ``weights`` are set. It is called with the bound inputs, and returns all results.

    results: (name, port) of each result. The port is None for a result that is no tensor.
    numbers: for each weight, its index among the tensors of the file.
    written: the indices, among the tensors of the file, of the weights that the graph writes.
    lock: held during each run. Stages that must not run at the same time share a lock.
    """

    interface: Interface
    results: Sequence[tuple[str, Port | None]]
    run: CompiledGraph
    numbers: Sequence[int]
    written: frozenset[int]
    weights: Sequence[torch.Tensor] = ()
    lock: AbstractContextManager[object] = field(default_factory=nullcontext[None])

    def __call__(self, values: Sequence[object]) -> Sequence[object]:
        with self.lock:
            return self.run(*self.weights, *values)


def load_stage(artifact: ReadArtifact, stage: Stage[int], options: SessionOptions) -> LoadedStage:
    """Rebuild the graph of a stage, and let the engine compile it. The caller then sets ``weights`` of the result.

    Raises ArtifactCorruptError if the graph is malformed.
    Raises EngineUnavailableError if the engine is missing or cannot run here.
    Raises CompileOptionError if the engine does not have one of the options.
    Raises TorchStateChangedError if torch's default dtype is not the one that the graph was compiled with.
    Raises CaptureError if the engine, while it compiled, added a guard on sizes that a call of the stage cannot check.
    Raises GraphFallbackError under the fallback policy ``error``.
    """
    return run_plain(_load_stage, (artifact, stage, options))


def _load_stage(artifact: ReadArtifact, stage: Stage[int], options: SessionOptions) -> LoadedStage:
    stage.requirement.check_default_dtype()
    read = read_stage(artifact, stage, options)
    engine = find_engine(options.engine or stage.engine, "")
    report = GraphReport(model=stage.model, index=-1, engine=engine.name, cause=LOADED)
    record(report)
    stored = stage.engine_options.items() if engine.name == stage.engine else ()
    compile_options = CompileOptions(
        engine=engine.name,
        fallback=options.fallback,
        small_regions="engine" if stage.small_regions else "eager",
        eager_ops=stage.eager_ops,
        cache_dir=options.cache_dir,
        engine_options={name: value for name, value in stored if name in engine.stored_options}
        | dict(options.engine_options),
    )
    check_options(engine, compile_options)
    with collecting(report):
        run = place(read.captured.graph_module, engine, compile_options)
    names: dict[object, str] = {plain_symbol(value): name for name, value in read.symbols.items()}
    ports = {port.name: port for port in stage.interface.outputs}
    return LoadedStage(
        with_guards(read.interface, read.captured.mode, names),
        [(name, ports.get(name)) for name in stage.results],
        run,
        stage.tensors[: stage.graph["weights"]],
        frozenset(stage.tensors[number] for number in read.writes),
    )


def read_stage(artifact: ReadArtifact, stage: Stage[int], options: SessionOptions) -> ReadGraph:
    """Rebuild the graph of a stage and run every op on fake tensors. Raises ArtifactCorruptError if an op fails."""
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
                raise CodecError(f"it does not return {len(stage.results)} results")
    except CodecError as cause:
        detail = f"the graph of entry {stage.entry!r}: {cause}"
        raise ArtifactCorruptError(source=artifact.source, detail=detail) from cause
    return read
