"""Compiled calls without guards, for adaptors that know themselves what can change between two calls.

Dynamo captures the function once; after that the inputs are read by the expressions that Dynamo found them by and the
program is called directly. Nothing is compiled behind the adaptor's back, and no guard costs time at each step. What
Dynamo would guard is the adaptor's business: it compiles one call for each combination of flags that it may pass,
and marks the sizes that change. A capture that assumes something of a size or number that may change is refused.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dlinfer.errors import ArtifactInputError, CaptureError, DlinferError
from dlinfer.graph import torch_seam
from dlinfer.graph.backend import compile_graph
from dlinfer.graph.call_inputs import Assumption, InputSpec, evaluate, is_steady, reader, root
from dlinfer.graph.compiled import CompiledGraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report import GraphReport


@dataclass
class DirectCall:
    """A compiled function. ``steady``: see ``capture_call``."""

    function: Callable[..., Any]
    program: CompiledGraph
    inputs: Sequence[InputSpec]
    assumptions: Sequence[Assumption]
    steady: frozenset[str]
    report: GraphReport

    def __post_init__(self) -> None:
        self._read: Callable[[Mapping[str, Any]], tuple[Any, ...]] | None = None
        self._held: tuple[Any, ...] = ()
        self._defaults: dict[str, Any] = {}  # of arguments that the call leaves out and the graph reads
        self._steady_names = sorted(name for name in self.steady if "." not in name)

    def __call__(self, **kwargs: Any) -> torch.Tensor:
        """Raises ArtifactInputError where a steady argument is another object and does not fit."""
        held = tuple(kwargs.get(name) for name in self._steady_names)
        if self._read is None or any(old is not new for old, new in zip(self._held, held, strict=True)):
            self._bind(kwargs, held)
        assert self._read is not None
        return self.program(*self._read(self._defaults | kwargs if self._defaults else kwargs))[0]

    def unbind(self) -> None:
        """Let go of what was read once: weights and steady arguments. The next call reads them again."""
        self._read, self._held = None, ()

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Raises ArtifactInputError where this compiled function is not one for such arguments."""
        given = _given(self.function, kwargs)
        for spec in self.inputs:
            try:
                value = evaluate(spec.source, given)
            except (KeyError, AttributeError, IndexError, TypeError) as cause:
                name = torch_seam.source_name(spec.source)
                raise ArtifactInputError(name=name, expected=str(spec), given=f"nothing ({cause})") from cause
            spec.check(value)
        for assumption in self.assumptions:
            assumption.check(given)

    def _bind(self, kwargs: Mapping[str, Any], held: tuple[Any, ...]) -> None:
        """Read what is steady once, and make a function that reads the rest."""
        self.check(kwargs)
        given = _given(self.function, kwargs)
        steady = {
            index: evaluate(spec.source, given)
            for index, spec in enumerate(self.inputs)
            if is_steady(spec.source, self.steady)
        }
        changing = [(index, spec.source) for index, spec in enumerate(self.inputs) if index not in steady]
        self._defaults = {
            name: given[name] for name in {root(source) for _, source in changing} - kwargs.keys()
        }
        self._read, self._held = reader(changing, steady), held


def method_of(function: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """(the function that Dynamo traces, what it calls self)."""
    if isinstance(function, torch.nn.Module):
        return function.forward, function
    return function, getattr(function, "__self__", None)


def _given(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The function's arguments as Dynamo's expressions find them in ``L``."""
    method, owner = method_of(function)
    parameters = inspect.signature(method).parameters.values()
    return {p.name: p.default for p in parameters} | dict(kwargs) | {"self": owner}


def capture_call(
    function: Callable[..., Any], kwargs: Mapping[str, Any], *, steady: Sequence[str], options: CompileOptions
) -> tuple[DirectCall, torch.Tensor]:
    """Compile ``function`` for calls like this one, and run it: (compiled, its result).

    function: a module, or a method of one, that gives one tensor.
    steady: arguments that are the same objects call after call; when another object comes, all is read anew. Of an
    argument that changes, ``argument.field`` or ``argument.size()[2]`` names a number in it that never does.
    Raises CaptureError where it is not one graph, or one that holds only for some values of what is not steady.
    """
    method, _ = method_of(function)
    collector = _Collector(options)
    compiled = torch.compile(function, backend=collector, fullgraph=True, dynamic=True)
    try:
        with torch.no_grad():
            result = compiled(**kwargs)
    except DlinferError:
        raise
    except torch_seam.dynamo_errors() as cause:
        ours = getattr(cause, "inner_exception", None)
        if isinstance(ours, DlinferError):
            raise ours from cause
        reason, line = torch_seam.explain_dynamo_error(cause)
        raise CaptureError(reason=reason, line=line) from cause
    finally:
        torch_seam.forget_compiled(method)  # each capture would count against Dynamo's limit for the function
    if not isinstance(result, torch.Tensor) or collector.program is None or collector.report is None:
        raise CaptureError(
            reason="it does not give one tensor", line=getattr(method, "__qualname__", repr(method))
        )
    given = _given(function, kwargs)
    inputs = []
    for source, example in collector.inputs:
        if not root(source):
            reason = f"it reads {source!r}, which is no argument of its own"
            raise CaptureError(reason=reason, line=getattr(method, "__qualname__", repr(method)))
        inputs.append(InputSpec.of(source, example, evaluate(source, given)))
    for assumption in collector.assumptions:
        if changing := assumption.changing(steady):
            reason = (
                f"it would hold only while {assumption}, and {', '.join(changing)} may change between calls"
            )
            raise CaptureError(reason=reason, line=getattr(method, "__qualname__", repr(method)))
    call = DirectCall(
        function, collector.program, inputs, collector.assumptions, frozenset(steady), collector.report
    )
    return call, result


class _Collector:
    """A Dynamo backend that keeps what it compiled."""

    def __init__(self, options: CompileOptions) -> None:
        self.options = options
        self.program: CompiledGraph | None = None
        self.report: GraphReport | None = None
        self.inputs: list[tuple[str, Any]] = []
        self.assumptions: list[Assumption] = []

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        sources = torch_seam.input_sources(graph_module.graph)
        self.inputs = [
            (s, node.meta.get("example_value")) for s, node in zip(sources, placeholders, strict=True)
        ]
        self.program, self.report = compile_graph(graph_module, example_inputs, self.options)
        mode = torch_seam.dynamo_fake_mode()
        assert mode is not None, "Dynamo calls its backends inside a tracing context"
        conditions = torch_seam.guards_by_source(mode) + torch_seam.equal_sizes(self.inputs)
        self.assumptions = [Assumption(*condition) for condition in conditions]
        return self.program
