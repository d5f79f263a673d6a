"""A stage: one compiled graph of an artifact, as plain data, with the tensors that the graph reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from dlinfer.errors import CaptureError
from dlinfer.graph.capture.export import Exported
from dlinfer.graph.codec.arguments import CodecError, Json
from dlinfer.graph.codec.graph import write_graph
from dlinfer.graph.engine import Engine
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.ir.global_state import Requirement
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.torch_private.expressions import SizeTextError
from dlinfer.graph.torch_private.fake_mode import FakeTensorMode
from dlinfer.graph.torch_private.symbol_guards import conditions_of

T = TypeVar("T", torch.Tensor, int)


@dataclass(frozen=True)
class Stage(Generic[T]):
    """One graph of an entry. It accepts the sizes that ``interface`` allows.

    engine_options: those options of the engine that files store.
    small_regions: whether the engine also compiles parts of the graph that are too small to be worth it.
    eager_ops: the ops that always run eagerly.
    requirement: the settings of torch that the graph depends on.
    graph: the graph as JSON.
    tensors: the graph's weights, then its constants. In a stage from a file, indices among the tensors of the file.
    results: the names of all results. Results that are tensors are also outputs of ``interface``.
    entry: the name of the stage's entry in a file.
    """

    model: str
    engine: str
    engine_options: Mapping[str, object]
    small_regions: bool
    eager_ops: Sequence[str]
    requirement: Requirement
    graph: Json
    tensors: Sequence[T]
    interface: Interface
    results: Sequence[str]
    entry: str = ""


def stage_of(
    exported: Exported, interface: Interface, engine: Engine, options: CompileOptions, model: str
) -> Stage[torch.Tensor] | str:
    """Return a graph as a stage, or a text: the reason why the graph cannot be stored.

    The passes must have run on the graph.
    """
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in exported.weights):
        return "a weight is a tensor subclass"
    graph_module = exported.captured.graph_module
    try:
        graph, constants = write_graph(graph_module, interface)
    except CodecError as cause:
        return str(cause)
    given_options = options.wanted_engine_options.items()
    return Stage(
        model,
        engine.name,
        {name: value for name, value in given_options if name in engine.stored_options},
        options.keeps_small_regions,
        options.eager_ops,
        Requirement.of(graph_module.graph),
        graph,
        [*exported.weights, *constants],
        interface,
        exported.names,
    )


def with_guards(interface: Interface, mode: FakeTensorMode, names: Mapping[object, str]) -> Interface:
    """Return the interface together with the guards on sizes that the engine added while it compiled.

    mode: the fake mode with these guards. names: symbol -> its name in the interface.

    Raises CaptureError if a call cannot check one of the guards.
    """
    try:
        added = conditions_of(mode, names)
    except SizeTextError as cause:
        raise CaptureError(
            reason=f"a guard cannot be checked at calls: {cause}", line="the engine"
        ) from cause
    conditions = {str(condition): condition for condition in (*interface.conditions, *added)}
    for text, condition in conditions.items():
        if not set(condition.symbols) <= set(interface.places):
            raise CaptureError(
                reason=f"the graph is valid only while {text}, but no input has these sizes",
                line="the engine",
            )
    return replace(interface, conditions=tuple(conditions.values()))
