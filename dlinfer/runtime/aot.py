"""Ahead-of-time compilation: ``dlinfer.compile`` compiles a module or an ExportedProgram.

It runs the same passes as ``torch.compile(backend="dlinfer")``.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from dlinfer.errors import CaptureError
from dlinfer.graph.capture.export import read_export
from dlinfer.graph.capture.zero_one_specialization import from_one_on
from dlinfer.graph.engine import check_options, find_engine
from dlinfer.graph.interface.of_graph import interface_of
from dlinfer.graph.ir.conj_neg import resolved
from dlinfer.graph.lowering.lower import improve, place
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.collect import collecting, emit, timed
from dlinfer.graph.report.report import GraphReport, record
from dlinfer.graph.torch_private.symbols import symbol_ranges
from dlinfer.graph.torch_private.thread_state import is_autocast_enabled, run_plain
from dlinfer.runtime.artifact.artifact import Artifact
from dlinfer.runtime.artifact.stage import stage_of, with_guards

_ADVICE = 'change the model there, or use torch.compile(backend="dlinfer"), which can run a part of the model eagerly.'

DynamicShapes: TypeAlias = dict[str, Any] | tuple[Any, ...] | list[Any] | None
"""The types of the argument ``dynamic_shapes``, as torch.export accepts them."""


def compile(
    module: torch.nn.Module | ExportedProgram,
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic_shapes: DynamicShapes = None,
    engine: str | None = None,
    options: Mapping[str, object] | CompileOptions | None = None,
) -> Artifact:
    """Compile a module ahead of time.

    module: an ExportedProgram, or a module in the mode (eval, train) to compile it in.
    args, kwargs: an example call. An ExportedProgram needs none.
    dynamic_shapes: which sizes may change, as for torch.export. If a size's range starts at 0 or 1 (``Dim("batch",
        min=1, max=64)``), a trial run at size 0 or 1 decides whether the artifact accepts that size.
    engine: name of the graph engine. It overrides ``engine`` in ``options``.
    options: as for ``torch.compile(backend="dlinfer", options=...)``.

    Returns an Artifact, which is called like the module, for inference only, and shares the module's weights.

    Raises CaptureError if torch.export cannot capture the module, or if autocast is on around the call. Also raises
    CaptureError if ``dynamic_shapes`` asks for size 1 but the module computes something else at that size.
    Raises CompileOptionError and EngineUnavailableError.
    Raises GraphFallbackError under the fallback policy ``error``.
    """
    if is_autocast_enabled() and not isinstance(module, ExportedProgram):
        raise CaptureError(
            reason=(
                "autocast is on around the compilation, and torch.export omits autocast's casts: enter autocast in "
                "the module's forward, or compile outside of autocast"
            ),
            line=type(module).__name__,
        )
    chosen = CompileOptions.of(options)
    if engine is not None:
        chosen = replace(chosen, engine=engine)
    try:
        return run_plain(_compile, (module, args, kwargs, dynamic_shapes, chosen))
    except CaptureError as error:
        reason, line, advice = (error.fields.get(name) for name in ("reason", "line", "advice"))
        raise CaptureError(reason=reason, line=line, advice=advice or _ADVICE) from error.__cause__


def _compile(
    module: torch.nn.Module | ExportedProgram,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
    dynamic_shapes: DynamicShapes,
    chosen: CompileOptions,
) -> Artifact:
    report = GraphReport(model=type(module).__name__, index=-1, engine="", cause="dlinfer.compile")
    with collecting(report):
        with timed("capture"):
            is_program = isinstance(module, ExportedProgram)
            program = module if is_program else _export(module, args, kwargs, dynamic_shapes)
            exported = read_export(program, module, args, kwargs)
        graph_engine = find_engine(chosen.wanted_engine, exported.device.type)
        check_options(graph_engine, chosen)
        report.engine = graph_engine.name
        record(report)
        with timed("capture"):
            exported = from_one_on(exported)
        captured = exported.captured
        emit(lambda report: report.symbols.update(symbol_ranges(captured.fakes)))
        improve(captured.graph_module, chosen)
        graph, mode = captured.graph_module.graph, captured.mode
        interface, names = interface_of(graph, mode, exported.inputs, exported.names, exported.ranges)
        # Store the graph before the engine compiles, and may change, it: a session lowers the stored graph itself.
        stored = stage_of(exported, interface, graph_engine, chosen, report.model)
        run = place(captured.graph_module, graph_engine, chosen)
        interface = with_guards(interface, mode, names)
    spec = program.call_spec
    assert spec.in_spec is not None and spec.out_spec is not None
    return Artifact(run, exported.weights, interface, spec.in_spec, spec.out_spec, report, stored)


def _export(
    module: torch.nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
    dynamic_shapes: DynamicShapes,
) -> ExportedProgram:
    # If two inputs are the same tensor object, torch.export merges them into one.
    taken = {id(weight) for weight in chain(module.parameters(), module.buffers())}

    def own(example: torch.Tensor) -> torch.Tensor:
        if id(example) in taken:
            return _with_plain_strides(example.detach())
        taken.add(id(example))
        return _with_plain_strides(example)

    args, kwargs = pytree.tree_map_only(torch.Tensor, own, (args, dict(kwargs or {})))
    try:
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as cause:  # torch.export raises many classes; the user needs the reason
        raise _capture_error(cause, type(module).__name__) from cause


def _capture_error(cause: Exception, line: str) -> CaptureError:
    """Return the error for a failure of torch.export. It leaves out torch's references to pages and settings."""
    text = [*str(cause).strip().splitlines(), ""]
    reason = re.split(r" (?:See|For more information)\b", text[0])[0].rstrip(".")
    if text[0].startswith("Constraints violated"):
        reason += text[1].replace("  - ", " ").rstrip(".")
    advice = _ADVICE
    unknown = re.search(r"Found <class '(.*?)'> in output", reason)
    if unknown is not None and unknown[1].endswith("Cache"):
        advice = "set model.config.use_cache = False, or return tensors only."
    elif unknown is not None:
        advice = "return tensors only, or register the class with torch.export.register_dataclass."
    elif getattr(getattr(cause, "error_type", None), "name", "") in ("CONSTRAINT_VIOLATION", "INVALID_INPUT"):
        advice = "correct dynamic_shapes or the example call."
    return CaptureError(reason=f"torch.export: {type(cause).__name__}: {reason}", line=line, advice=advice)


def _with_plain_strides(example: torch.Tensor) -> torch.Tensor:
    """Return the example; if it is contiguous, with the strides that torch gives a new tensor of the same sizes.

    A contiguous tensor may have any stride in a dimension of size 1. torch.export would mistake an unusual stride for a
    second dynamic size. An example that torch holds lazily conjugated or negated is resolved first, as the inputs of
    each call are.
    """
    example = resolved(example)
    plain = torch.empty(example.shape, device="meta").stride()
    if not example.is_contiguous() or example.stride() == plain:
        return example
    return example.detach().as_strided(example.shape, plain)
