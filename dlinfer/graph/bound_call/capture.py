"""Capture a function as a bound call.

An adaptor captures a function once for each combination of the flags that the adaptor passes to it. It marks the sizes
that change between calls (``mark_unbacked``). If Dynamo adds a guard on a marked size, the capture is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn

from dlinfer.errors import CaptureError, DlinferError
from dlinfer.graph.backend import compile_graph
from dlinfer.graph.bound_call.call import BoundCall
from dlinfer.graph.bound_call.sources import ABSENT, Scope, Traced, evaluate, is_argument, is_steady, root
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import ANY_NUMBER, Port, bounds_of
from dlinfer.graph.ir.conj_neg import is_lazy
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.report import GraphReport
from dlinfer.graph.torch_private import dynamo, symbol_guards
from dlinfer.graph.torch_private.dynamo import source_name
from dlinfer.graph.torch_private.expressions import Size, SizeTextError, parse_size
from dlinfer.graph.torch_private.symbols import fixed_size

_HOOKS = ("._forward_hooks", "._forward_pre_hooks")


def capture_call(
    function: Callable[..., Any],
    kwargs: Mapping[str, object],
    *,
    steady: Sequence[str],
    options: CompileOptions,
) -> tuple[BoundCall, torch.Tensor]:
    """Compile ``function`` for arguments like ``kwargs``, and run it once. Return the bound call and the run's result.

    function: a module, or a method of a module. It must return one new tensor and store no tensor. Its other effects on
        Python objects happen in this first run only.
    steady: names of arguments that are the same object at each call. If a later call passes another object, the bound
        call keeps that object from then on. Inside an argument that changes, a number may be steady: name it as
        ``argument.field`` or ``argument.size()[2]``.
    Raises CaptureError if the function is not one graph, or if the graph depends on a value that is not steady.
    """
    traced = Traced(function)
    line = getattr(traced.method, "__qualname__", repr(traced.method))
    scope = traced.scope(kwargs)
    # Dynamo traces only the forward of a module. Its hooks run around the forward.
    hooks = [f"L['self']{name}" for name in _HOOKS] if isinstance(function, nn.Module) else []
    if any(evaluate(source, scope) for source in hooks):
        raise CaptureError(reason="it has hooks, which a compiled call would skip", line=line)
    backend = _Backend(options, traced.receiver)
    # torch declares the parameter ``options`` as a dict of anything.
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)  # pyright: ignore[reportUnknownMemberType]
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
        reason = f"the graph would be valid only while {condition}, but this call violates this condition"
        raise CaptureError(reason=reason, line=line) from cause
    finally:
        # Each capture would count against Dynamo's limit for the function.
        dynamo.forget_compiled(traced.method)
    try:
        backend.check(result, steady)
        interface, sources = backend.interface(scope, steady)
    except _CannotServeError as cause:
        raise CaptureError(reason=str(cause), line=line) from None
    assert backend.compiled is not None
    program, report = backend.compiled
    hooks += backend.empty_hooks(scope)
    return BoundCall(function, program, interface, sources, hooks, frozenset(steady), report), result


class _CannotServeError(Exception):
    """The captured graph would be wrong for later calls. The text says why."""


class _Backend:
    """A Dynamo backend that keeps the compiled graph and the graph's assumptions.

    receiver: the parameter that holds the function's owner, such as ``self``.
    _inputs: a pair (source, fake) for each input.
    _written: for each input, whether the graph writes it.
    _conditions: pairs (condition, sources). In a condition, v0 stands for the first source, v1 for the second, and so
        on.
    _twice: pairs of sources that are the same tensor.
    _specialized: sources of the constants that Dynamo read.
    _first_run: the inputs and outputs of the run at capture.
    """

    def __init__(self, options: CompileOptions, receiver: str) -> None:
        self._options = options
        self._receiver = f"L['{receiver}']"
        self.compiled: tuple[CompiledGraph, GraphReport] | None = None
        self._inputs: list[tuple[str, object]] = []
        self._written: list[bool] = []
        self._conditions: list[tuple[Size, tuple[str, ...]]] = []
        self._twice: list[tuple[str, str]] = []
        self._specialized: list[str] = []
        self._first_run: tuple[Sequence[object], Sequence[object]] = ((), ())

    def __call__(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[object]
    ) -> Callable[..., tuple[object, ...]]:
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        sources = map(self._renamed, dynamo.input_sources(graph_module.graph))
        fakes = (node.meta.get("example_value") for node in placeholders)
        self._inputs = list(zip(sources, fakes, strict=True))
        program, graph, report = compile_graph(graph_module, example_inputs, self._options, keep_floats=False)
        self.compiled = program, report
        self._written = [*map(effects_of(graph).is_written, graph.find_nodes(op="placeholder"))]
        mode = dynamo.dynamo_fake_mode()
        assert mode is not None, "Dynamo calls its backends inside a tracing context"
        try:
            self._conditions = symbol_guards.conditions(mode, self._inputs)
        except SizeTextError as cause:
            raise CaptureError(
                reason=f"a guard on a size cannot be checked: {cause}", line="the call"
            ) from cause
        self._twice = [(self._renamed(a), self._renamed(b)) for a, b in dynamo.inputs_given_twice()]
        self._specialized = list(dict.fromkeys(map(self._renamed, dynamo.constants_read())))

        def run(*inputs: object) -> tuple[object, ...]:
            outputs = program(*inputs)
            self._first_run = inputs, outputs
            return outputs

        return run

    def _renamed(self, source: str) -> str:
        """Return a Dynamo source expression, with ``L['self']`` in place of the owner's name in the signature."""
        is_owners = source.startswith(self._receiver)
        return "L['self']" + source[len(self._receiver) :] if is_owners else source

    def check(self, result: object, steady: Sequence[str]) -> None:
        """Raise _CannotServeError if the graph would be wrong for later calls, and release the first run's tensors.

        result: the function's return value in the first run. steady: as in ``capture_call``.
        """
        (inputs, outputs), self._first_run = self._first_run, ((), ())
        if self.compiled is None or not isinstance(result, torch.Tensor):
            raise _CannotServeError("it does not return exactly one tensor")
        if len(outputs) != 1 or outputs[0] is not result:
            raise _CannotServeError("it returns or stores tensors other than its one computed result")
        for source, _ in self._inputs:
            if not root(source):
                raise _CannotServeError(f"it reads {source!r}, which is not one of its arguments")
        for condition, read in self._conditions:
            if changing := [source_name(source) for source in read if not is_steady(source, steady)]:
                names = {f"v{index}": source_name(source) for index, source in enumerate(read)}
                text = condition.renamed(names)
                raise _CannotServeError(
                    f"the graph would be valid only while {text}, but {', '.join(changing)} may change "
                    "between calls"
                )
        for pair in self._twice:
            if all(map(root, pair)) and not all(is_steady(source, steady) for source in pair):
                first, second = map(source_name, pair)
                raise _CannotServeError(
                    f"{first} and {second} are the same tensor in this call, but may be two tensors in "
                    "another call"
                )
        for (source, _), value, is_written in zip(self._inputs, inputs, self._written, strict=True):
            if is_steady(source, steady):
                continue
            name = source_name(source)
            if is_written:
                raise _CannotServeError(f"it writes into {name}, which may be another tensor at each call")
            if isinstance(value, torch.Tensor) and _is_one_memory(result, value):
                raise _CannotServeError(f"its result is a view of {name}, and a call may have to copy {name}")

    def interface(self, scope: Scope, steady: Sequence[str]) -> tuple[Interface, list[str]]:
        """Return two things: the graph's interface, and the list of the sources of the interface's values.

        Raises _CannotServeError if the graph fixes the value or the strides of an input that may change between calls.
        """
        ports: list[Port] = []
        constants: dict[int, object] = {}
        for place, (source, fake) in enumerate(self._inputs):
            value, name, fixed = evaluate(source, scope), source_name(source), ""
            # A module's eps: Dynamo passes a tensor, and the capture makes it a constant.
            if isinstance(value, float):
                constants[place], fixed = value, str(value)
            else:
                port = _port(source, fake, value, is_steady(source, steady))
                ports.append(port)
                fixed = "" if port.strides is None else str(port)
                if None in port.sizes[1:] and value.numel() == 0:
                    raise _CannotServeError(
                        f"{name} has no elements in this call, so its strides at other sizes are unknown"
                    )
            if fixed and not is_steady(source, steady):
                raise _CannotServeError(
                    f"the graph would be valid only while {name} is {fixed}, which may change between calls"
                )
        symbols: dict[str, str] = {}  # source of a number that a condition reads -> the number's symbol
        conditions: list[Size] = []
        for condition, read in self._conditions:
            names = {
                f"v{index}": symbols.setdefault(source, f"s{len(symbols)}")
                for index, source in enumerate(read)
            }
            conditions.append(condition.renamed(names))
        ports += [
            Port.of_number(source_name(source), parse_size(symbol)) for source, symbol in symbols.items()
        ]
        sources = [*(source for source, _ in self._inputs), *symbols]
        for source, value in self._values(scope):
            if type(value) in (bool, int, str, type(None)):
                constants[len(sources)] = value
                sources.append(source)
        ranges = dict.fromkeys(symbols.values(), ANY_NUMBER)
        return Interface(tuple(ports), (), ranges, tuple(conditions), constants), sources

    def empty_hooks(self, scope: Scope) -> list[str]:
        """Return the sources of modules' hook dicts that are empty now."""
        return [source for source, value in self._values(scope) if source.endswith(_HOOKS) and not value]

    def _values(self, scope: Scope) -> Iterator[tuple[str, Any]]:
        """Yield a pair (source, value) for each constant that calls must compare.

        These are arguments, values inside the function's owner (``self``), and globals. A value inside an argument
        other than the owner is not among them: the adaptor must keep it constant.
        """
        for source in self._specialized:
            if is_argument(source) or source.startswith(("L['self'].", "G[")):
                with suppress(*ABSENT):
                    yield source, evaluate(source, scope)


def _port(source: str, fake: object, value: Any, held: bool) -> Port:
    """Return the Port of an input: the dtype, sizes and strides that are checked at each call.

    fake: Dynamo's fake for the input. value: the input in the captured call. held: whether the bound call keeps this
        input between calls.
    """
    if not isinstance(fake, torch.Tensor):
        return Port.of_number(source_name(source), None)
    sizes = tuple(None if (number := fixed_size(size)) is None else parse_size(number) for size in fake.shape)
    strides = None if value.is_contiguous() else tuple(map(parse_size, value.stride()))
    return Port(
        source_name(source),
        value.dtype,
        sizes,
        bounds_of(sizes, {}),
        value.device,
        strides,
        held=held,
        resolved=is_lazy(value),
    )


def _is_one_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    start = first.untyped_storage().data_ptr()
    return start != 0 and start == second.untyped_storage().data_ptr()
