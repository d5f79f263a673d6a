"""Compiled calls without Dynamo's guards, for adaptors that know what can change between two calls.

Dynamo captures the function once. Later calls read the inputs by Dynamo's source expressions and run the program, so
nothing recompiles and no guard costs time. The adaptor compiles one call for each combination of flags that it passes,
and marks the sizes that change. A capture with a guard on a size that may change is refused. So is a call whose
constants (``constants``) differ from the capture's; constants inside an argument are not compared.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dlinfer.errors import ArtifactInputError, CaptureError, DlinferError
from dlinfer.graph.backend import compile_graph
from dlinfer.graph.bound_call.binding import Reader, bind
from dlinfer.graph.bound_call.constants import (
    Constant,
    constants_of,
    hooks_of,
    hooks_registered,
    receiver_of,
)
from dlinfer.graph.bound_call.inputs import evaluate, is_steady, number_port, port_of, root
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import ANY_NUMBER, Port
from dlinfer.graph.ir.device import autocast
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.report import GraphReport
from dlinfer.graph.torch_private import dynamo, guards
from dlinfer.graph.torch_private.expressions import Size, SizeTextError, parse_size
from dlinfer.graph.torch_private.thread_state import is_autocast_enabled


@dataclass
class BoundCall:
    """A compiled function.

    sources: where each value of the interface is read from the arguments: first what the program takes, then numbers
        that only conditions read. steady: see ``capture_call``.
    """

    function: Callable[..., Any]
    program: CompiledGraph
    interface: Interface
    sources: Sequence[str]
    steady: frozenset[str]
    report: GraphReport
    constants: Sequence[Constant] = ()

    def __post_init__(self) -> None:
        # Swapped as a whole: threads find the old one or the new one, and each reads all inputs through one.
        self._binding: Reader | None = None
        self._autocast = dict(self.program.requirement.state.autocast)
        self._namespace = namespace_of(self.function)
        parameters = inspect.signature(method_of(self.function)[0]).parameters
        sources = [*self.sources, *(one.source for one in self.constants)]
        self._defaults = {  # of arguments that the graph reads and a call may leave out
            name: parameters[name].default
            for name in map(root, sources)
            if name in parameters and parameters[name].default is not inspect.Parameter.empty
        }

    def __call__(self, **kwargs: Any) -> torch.Tensor:
        """The result, laid out as for contiguous arguments: a changing one that is not contiguous is copied first.

        Raises ArtifactInputError where an argument, or something in one, is not what the graph was compiled for.
        """
        if self._autocast or is_autocast_enabled():
            self._check_autocast()
        binding = self._binding
        inputs = None if binding is None else binding(kwargs)
        if inputs is None:
            inputs = self._bind(kwargs)
        return self.program(*inputs)[0]

    def unbind(self) -> None:
        """Let go of what was read once: weights and steady arguments. The next call reads them again."""
        self._binding = None
        self.program.unbind()

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Raises ArtifactInputError where this compiled function is not one for such arguments."""
        self._inputs(_given(self.function, kwargs))

    def _inputs(self, given: Mapping[str, Any]) -> list[Any]:
        """What the program takes of arguments that fit it. Raises ArtifactInputError."""
        self._check_autocast()
        leaves: list[Any] = []
        for source in self.sources:
            try:
                leaves.append(evaluate(source, given))
            except (KeyError, AttributeError, IndexError, TypeError) as cause:
                name = dynamo.source_name(source)
                raise ArtifactInputError(
                    name=name, expected="what was captured", given=f"nothing ({cause})"
                ) from cause
        inputs, _ = self.interface.bind(
            self.interface.values_among(leaves, [dynamo.source_name(source) for source in self.sources])
        )
        for constant in self.constants:
            constant.check(given, self._namespace)
        return inputs[: len(self.program.program.inputs)]

    def _check_autocast(self) -> None:
        """Raises ArtifactInputError where the function would cast otherwise now: casts are nodes of the graph."""
        if (given := autocast()) != self._autocast:
            raise ArtifactInputError(
                name="autocast", expected=self._autocast or "autocast off", given=given or "autocast off"
            )

    def _bind(self, kwargs: Mapping[str, Any]) -> list[Any]:
        """Bind what is steady in these arguments, and read all inputs from them."""
        hooks = hooks_registered()  # before they are looked at: another thread may register one meanwhile
        given = _given(self.function, kwargs)
        inputs = self._inputs(given)
        binding = bind(
            self.interface,
            self.sources,
            len(self.program.program.inputs),
            self.steady,
            given,
            self._defaults,
            self.constants,
            self._namespace,
            hooks,
        )
        # What is another object whenever it is read, as a property may give, is bound at each call.
        found = binding(kwargs)
        self._binding = binding
        return inputs if found is None else found


def method_of(function: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """(the function that Dynamo traces, what it calls self)."""
    if isinstance(function, torch.nn.Module):
        return function.forward, function
    return function, getattr(function, "__self__", None)


def namespace_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The globals of the function that Dynamo traces."""
    return getattr(inspect.unwrap(method_of(function)[0]), "__globals__", {})


def _given(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The function's arguments as Dynamo's expressions find them in ``L``."""
    method, owner = method_of(function)
    parameters = inspect.signature(method).parameters.values()
    return {p.name: p.default for p in parameters} | dict(kwargs) | {"self": owner}


def capture_call(
    function: Callable[..., Any], kwargs: Mapping[str, Any], *, steady: Sequence[str], options: CompileOptions
) -> tuple[BoundCall, torch.Tensor]:
    """Compile ``function`` for calls like this one, and run it: (compiled, its result).

    function: a module, or a method of one, that gives one new tensor and stores none; what it does besides to Python
    objects happens in this first run only.
    steady: arguments that are the same objects call after call; when another object comes, all is read anew. Of an
    argument that changes, ``argument.field`` or ``argument.size()[2]`` names a number in it that never does.
    Raises CaptureError where it is not one graph, or one that holds only for some values of what is not steady.
    """
    method, _ = method_of(function)
    line = getattr(method, "__qualname__", repr(method))
    hooks = hooks_of(function)
    if any(evaluate(source, {"self": function}) for source in hooks):
        raise CaptureError(reason="it has hooks, which a compiled call would leave out", line=line)
    collector = _Collector(options, receiver_of(function))
    compiled = torch.compile(function, backend=collector, fullgraph=True, dynamic=True)
    try:
        with torch.no_grad():
            result = compiled(**kwargs)
    except DlinferError:
        raise
    except dynamo.dynamo_errors() as cause:
        ours = getattr(cause, "inner_exception", None)
        if isinstance(ours, DlinferError):
            raise ours from cause
        reason, model_line = dynamo.explain_dynamo_error(cause)
        raise CaptureError(reason=reason, line=model_line) from cause
    except AssertionError as cause:
        condition = dynamo.broken_at_once(cause)
        if not condition:
            raise
        reason = f"it would hold only while {condition}, which is not so in this call"
        raise CaptureError(reason=reason, line=line) from cause
    finally:
        dynamo.forget_compiled(method)  # each capture would count against Dynamo's limit for the function
    reason = collector.reason_against(result, steady)
    collector.release()
    if reason:
        raise CaptureError(reason=reason, line=line)
    assert collector.program is not None and collector.report is not None
    given = _given(function, kwargs)
    interface, sources = _interface(collector, given, steady, line)
    constants = constants_of([*hooks, *collector.constants], given, namespace_of(function))
    call = BoundCall(
        function,
        collector.program,
        interface,
        sources,
        frozenset(steady),
        collector.report,
        constants,
    )
    return call, result


def _interface(
    collector: "_Collector", given: Mapping[str, Any], steady: Sequence[str], line: str
) -> tuple[Interface, list[str]]:
    """The ports and conditions of a captured graph, and where their values are read.

    Raises CaptureError where a port holds for this call only.
    """
    ports: list[Port] = []
    constants: dict[int, float] = {}
    for place, (source, example) in enumerate(collector.inputs):
        value, name = evaluate(source, given), dynamo.source_name(source)
        fixed: Any = None
        if isinstance(value, float):  # a module's eps: Dynamo passes it as a tensor, the capture folds it
            fixed = constants[place] = value
        else:
            port = port_of(source, example, value, steady)
            ports.append(port)
            fixed = None if port.strides is None else port
            if None in port.sizes[1:] and value.numel() == 0:
                reason = f"{name} has no elements in this call, so its strides say nothing of other sizes"
                raise CaptureError(reason=reason, line=line)
        if fixed is not None and not is_steady(source, steady):
            reason = f"it would hold only while {name} is {fixed}, which may change between calls"
            raise CaptureError(reason=reason, line=line)
    symbols: dict[str, str] = {}  # where a condition reads a number -> its symbol
    conditions: list[Size] = []
    for condition, read in collector.conditions:
        names = {f"v{index}": symbols.setdefault(one, f"s{len(symbols)}") for index, one in enumerate(read)}
        conditions.append(condition.renamed({name: names[name] for name in condition.symbols}))
    ports += [number_port(source, parse_size(symbol)) for source, symbol in symbols.items()]
    ranges = dict.fromkeys(symbols.values(), ANY_NUMBER)
    interface = Interface(tuple(ports), (), ranges, tuple(conditions), constants)
    return interface, [source for source, _ in collector.inputs] + list(symbols)


class _Collector:
    """A Dynamo backend that keeps what it compiled. receiver: what the function calls its owner."""

    def __init__(self, options: CompileOptions, receiver: str) -> None:
        self.options = options
        self._receiver = f"L['{receiver}']"
        self.constants: list[str] = []
        self.program: CompiledGraph | None = None
        self.report: GraphReport | None = None
        self.inputs: list[tuple[str, Any]] = []
        self.conditions: list[tuple[Size, tuple[str, ...]]] = []
        self._twice: list[tuple[str, str]] = []
        self._given: tuple[Any, ...] = ()
        self._outputs: tuple[Any, ...] = ()

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        sources = map(self._renamed, dynamo.input_sources(graph_module.graph))
        self.inputs = [
            (s, node.meta.get("example_value")) for s, node in zip(sources, placeholders, strict=True)
        ]
        self.program, self.report = compile_graph(
            graph_module, example_inputs, self.options, keep_floats=False
        )
        mode = dynamo.dynamo_fake_mode()
        assert mode is not None, "Dynamo calls its backends inside a tracing context"
        try:
            self.conditions = guards.conditions(mode, self.inputs)
        except SizeTextError as cause:
            raise CaptureError(reason=f"a guard on a size: {cause}", line="the call") from cause
        self._twice = [
            (self._renamed(one), self._renamed(other)) for one, other in dynamo.inputs_given_twice()
        ]
        self.constants = list(map(self._renamed, dynamo.constants_read()))
        return self._run

    def _renamed(self, source: str) -> str:
        """An expression of Dynamo's with the owner as ``self``, whatever the function calls it."""
        is_owners = source.startswith(self._receiver)
        return "L['self']" + source[len(self._receiver) :] if is_owners else source

    def _run(self, *inputs: Any) -> tuple[Any, ...]:
        assert self.program is not None
        self._given, self._outputs = inputs, self.program(*inputs)
        return self._outputs

    def release(self) -> None:
        """Let go of the tensors of the first run, caches and weights among them."""
        self._given, self._outputs = (), ()

    def reason_against(self, result: Any, steady: Sequence[str]) -> str:
        """Why the graph cannot stand for the function at later calls; empty where it can."""
        if self.report is None or not isinstance(result, torch.Tensor):
            return "it does not give one tensor"
        if len(self._outputs) != 1 or self._outputs[0] is not result:
            return "it gives or stores other tensors than the one that it computes"
        for source, _ in self.inputs:
            if not root(source):
                return f"it reads {source!r}, which is no argument of its own"
        for condition, read in self.conditions:
            if changing := [dynamo.source_name(source) for source in read if not is_steady(source, steady)]:
                names = {f"v{index}": dynamo.source_name(source) for index, source in enumerate(read)}
                text = condition.renamed({name: names[name] for name in condition.symbols})
                return f"it would hold only while {text}, and {', '.join(changing)} may change between calls"
        for pair in self._twice:
            if all(map(root, pair)) and not all(is_steady(source, steady) for source in pair):
                one, other = map(dynamo.source_name, pair)
                return f"{one} and {other} are one tensor now, and may be two at another call"
        for (source, _), given in zip(self.inputs, self.report.inputs, strict=True):
            if given.written and not is_steady(source, steady):
                return (
                    f"it writes into {dynamo.source_name(source)}, which may be another tensor at each call"
                )
        for (source, _), given in zip(self.inputs, self._given, strict=True):
            is_view = isinstance(given, torch.Tensor) and _one_memory(result, given)
            if is_view and not is_steady(source, steady):
                return f"its result is a view of {dynamo.source_name(source)}, which each call may copy"
        return ""


def _one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    start = one.untyped_storage().data_ptr()
    return start != 0 and start == other.untyped_storage().data_ptr()
