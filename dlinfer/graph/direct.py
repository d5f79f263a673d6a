"""Compiled calls without guards, for adaptors that know themselves what can change between two calls.

Dynamo captures the function once; after that the inputs are read by the expressions that Dynamo found them by and the
program is called directly. Nothing is compiled behind the adaptor's back, and no guard costs time at each step. What
Dynamo would guard is the adaptor's business: it compiles one call for each combination of flags that it may pass,
and marks the sizes that change.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dlinfer.errors import CaptureError, DlinferError
from dlinfer.graph import torch_seam
from dlinfer.graph.backend import compile_graph
from dlinfer.graph.compiled import CompiledGraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report import GraphReport


@dataclass(frozen=True)
class InputSpec:
    """One input of a graph: the expression over ``L`` that reads it, and what it must be.

    dtype: of a tensor; empty for a number. sizes: of a tensor, None where the graph takes any.
    folded: the number that the graph took as a constant.
    """

    source: str
    dtype: str
    sizes: tuple[int | None, ...]
    folded: float | None = None

    @classmethod
    def of(cls, source: str, example: Any, value: Any) -> "InputSpec":
        """The spec of a graph input with this fake, that was read as ``value``."""
        if isinstance(value, float):  # a module's eps: Dynamo passes it as a tensor, the capture folds it
            return cls(source, "", (), value)
        if not isinstance(example, torch.Tensor):
            return cls(source, "", ())
        return cls(
            source, str(example.dtype), tuple(n if isinstance(n, int) else None for n in example.shape)
        )

    def misfit(self, value: Any) -> str | None:
        """Why a value cannot be this input."""
        if self.folded is not None:
            return None if value == self.folded else f"{self.source} is {value}, not {self.folded}"
        if not self.dtype:
            return None if isinstance(value, (int, float)) else f"{self.source} is no number"
        if (
            not isinstance(value, torch.Tensor)
            or str(value.dtype) != self.dtype
            or value.dim() != len(self.sizes)
        ):
            return f"{self.source} is no {self.dtype} tensor of {len(self.sizes)} dimensions"
        if any(want is not None and want != size for want, size in zip(self.sizes, value.shape, strict=True)):
            return f"{self.source} has sizes {tuple(value.shape)}, not {self.sizes}"
        return None


@dataclass
class DirectCall:
    """A compiled function. ``steady`` names the arguments that are the same objects at each call."""

    function: Callable[..., Any]
    program: CompiledGraph
    inputs: Sequence[InputSpec]
    steady: frozenset[str]
    report: GraphReport

    def __post_init__(self) -> None:
        self._read: Callable[[Mapping[str, Any]], tuple[Any, ...]] | None = None
        self._held: tuple[Any, ...] = ()
        self._defaults: dict[str, Any] = {}  # of arguments that the call leaves out and the graph reads
        self._steady_names = sorted(self.steady)

    def __call__(self, **kwargs: Any) -> torch.Tensor:
        held = tuple(kwargs.get(name) for name in self._steady_names)
        if self._read is None or any(old is not new for old, new in zip(self._held, held, strict=True)):
            self._bind(kwargs, held)
        assert self._read is not None
        return self.program(*self._read(self._defaults | kwargs if self._defaults else kwargs))[0]

    def unbind(self) -> None:
        """Let go of what was read once: weights and steady arguments. The next call reads them again."""
        self._read, self._held = None, ()

    def misfit(self, kwargs: Mapping[str, Any]) -> str | None:
        """Why this compiled function is not one for such arguments; None where it is."""
        given = _given(self.function, kwargs)
        for spec in self.inputs:
            try:
                value = _evaluate(spec.source, given)
            except (KeyError, AttributeError, IndexError, TypeError) as cause:
                return f"{spec.source}: {cause}"
            reason = spec.misfit(value)
            if reason is not None:
                return reason
        return None

    def _bind(self, kwargs: Mapping[str, Any], held: tuple[Any, ...]) -> None:
        """Read what is steady once, and write a function that reads the rest."""
        given = _given(self.function, kwargs)
        scope: dict[str, Any] = {}
        parts = []
        for index, spec in enumerate(self.inputs):
            if self._is_steady(spec.source):
                scope[f"c{index}"] = _evaluate(spec.source, given)
                parts.append(f"c{index}")
            else:
                parts.append(spec.source)
        text = f"def read(L):\n    return ({', '.join(parts)},)\n"
        exec(
            compile(text, "<dlinfer inputs>", "exec"), scope
        )  # expressions of Dynamo's own, as its guards are
        read = {_root(spec.source) for spec in self.inputs if not self._is_steady(spec.source)}
        self._defaults = {name: given[name] for name in read - kwargs.keys()}
        self._read, self._held = scope["read"], held

    def _is_steady(self, source: str) -> bool:
        root = _root(source)
        return root == "self" or root in self.steady


_EXPRESSION = re.compile(r"L\['(\w+)'\](\.(?:size|stride|storage_offset)\(\)|\.\w+|\['\w+'\]|\[\d+\])*")


def _root(source: str) -> str:
    """The argument that an expression reads from; empty for an expression of another form."""
    found = _EXPRESSION.fullmatch(source)
    return found.group(1) if found else ""


def _evaluate(source: str, given: Mapping[str, Any]) -> Any:
    if not _root(source):
        raise KeyError(source)
    return eval(source, {"__builtins__": {}}, {"L": given})  # attributes and items only: see _EXPRESSION


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

    function: a module, or a method of one, that gives one tensor. Raises CaptureError where it is not one graph.
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
        if not _root(source):
            reason = f"it reads {source!r}, which is no argument of its own"
            raise CaptureError(reason=reason, line=getattr(method, "__qualname__", repr(method)))
        inputs.append(InputSpec.of(source, example, _evaluate(source, given)))
    return DirectCall(function, collector.program, inputs, frozenset(steady), collector.report), result


class _Collector:
    """A Dynamo backend that keeps what it compiled."""

    def __init__(self, options: CompileOptions) -> None:
        self.options = options
        self.program: CompiledGraph | None = None
        self.report: GraphReport | None = None
        self.inputs: list[tuple[str, Any]] = []

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        sources = torch_seam.input_sources(graph_module.graph)
        self.inputs = [
            (s, node.meta.get("example_value")) for s, node in zip(sources, placeholders, strict=True)
        ]
        self.program, self.report = compile_graph(graph_module, example_inputs, self.options)
        return self.program
