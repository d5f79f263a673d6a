"""Dynamo: facts about the graph that Dynamo passes to a backend, its reasons for recompiling, and marks on inputs."""

# Parts of torch have no types, and some names are private.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""The target of the nodes in a Dynamo graph that switch gradients on or off."""


def dynamo_fake_mode() -> FakeTensorMode | None:
    """Return the fake mode that Dynamo made for the backend call in progress; None if no such call is in progress."""
    context = TracingContext.try_get()
    return context.fake_mode if context is not None else None


def _context() -> TracingContext:
    context = TracingContext.try_get()
    assert context is not None, "called outside a Dynamo backend"
    return context


def fakes_of_inputs(mode: FakeTensorMode, inputs: Sequence[object]) -> list[object]:
    """Return fakes of a Dynamo graph's inputs, with the symbolic sizes that Dynamo chose.

    Dynamo passes a fresh fake mode to the backend, because tracing may have changed Dynamo's own fakes. The symbolic
    context of each tensor still holds the symbols.
    """
    contexts = _context().tensor_to_context

    def faked(value: object) -> object:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        symbolic = contexts.get(value)
        # Dynamo looks up symbols by the source of the tensor.
        source = getattr(symbolic, "tensor_source", None)
        return mode.from_tensor(
            value, symbolic_context=symbolic, source=source, static_shapes=symbolic is None
        )

    return [faked(value) for value in inputs]


def input_sources(graph: fx.Graph) -> list[str]:
    """Return Dynamo's source expression of each placeholder, such as ``L['x']``; empty for an input without one."""
    names: list[str] = []
    for node in graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        names.append(argument.source.name if argument is not None else "")
    return names


def is_static_input(placeholder: fx.Node) -> bool:
    """Return whether Dynamo marks an input as static: a module's parameter or buffer, the same tensor at each call."""
    return "_dynamo_static_input_type" in (placeholder.meta.get("tensor_dict") or {})


_OF_CLASS = re.compile(r"(?:dict\()?type\((L\[.*?)\)(?:\.__mro__\[\d+\])?\.__dict__\)?\['(\w+)'\]")


def constants_read() -> list[str]:
    """Return Dynamo's sources of values that it specialized on: numbers, flags, names, and empty dicts of hooks.

    A class attribute is written as an attribute of the object, because the object may later get its own attribute of
    this name.
    """
    kinds = ("CONSTANT_MATCH", "EQUALS_MATCH", "EMPTY_NN_MODULE_HOOKS_DICT")
    guards = _context().guards_context.dynamo_guards
    names = {guard.name for guard in guards if guard.create_fn_name() in kinds}
    return sorted({_OF_CLASS.sub(r"\1.\2", name) if _OF_CLASS.fullmatch(name) else name for name in names})


def inputs_given_twice() -> list[tuple[str, str]]:
    """Return pairs of sources that are the same input tensor. Dynamo's graph takes only the first of each pair."""
    return [
        (guard.name, guard.create_fn.keywords["source_b"].name)  # pyright: ignore[reportFunctionMemberAccess]
        for guard in _context().guards_context.dynamo_guards
        if guard.create_fn_name() == "DUPLICATE_INPUT"
    ]


def recompilation_cause() -> str:
    """Return Dynamo's reason for the present recompilation; empty at the first compilation by this backend."""
    from torch._dynamo.utils import get_metrics_context

    reason = get_metrics_context()._metrics.get("recompile_reason") or ""
    return "" if "BACKEND_MATCH failure" in reason else reason


def dynamo_errors() -> tuple[type[Exception], ...]:
    """Return the exception classes that Dynamo raises if it cannot capture a function."""
    from torch._dynamo import exc

    return (exc.TorchDynamoException,)


def explain_dynamo_error(cause: Exception) -> tuple[str, str]:
    """Return the reason for an error of a class in ``dynamo_errors``, and the line of the model."""
    inner = getattr(cause, "inner_exception", None)  # of an error that the backend raised
    cause = inner if isinstance(inner, Exception) else cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    places = [line for line in lines if line.startswith("File ")]
    return lines[0] if lines else type(cause).__name__, places[-1] if places else "an unknown line"


def broken_at_once(cause: AssertionError) -> str:
    """Return the guard that is false already for the call that Dynamo captured; empty for another AssertionError.

    Dynamo assumes that two sizes are equal if a broadcast makes them equal. But an unbacked size may have been 1.
    """
    match = re.match(r"Guard failed on the same frame.*reason: [\d/]+: (.*?)\s*(#|$)", str(cause), re.DOTALL)
    return match[1] if match else ""


def graph_breaks() -> list[tuple[str, str]]:
    """Return pairs (reason, ``file:line, in function``), one for each graph break since ``torch._dynamo.reset``."""
    from torch._dynamo.utils import graph_break_reasons

    frames = [(broken.reason, broken.user_stack[-1:]) for broken in graph_break_reasons]
    return [
        (reason, "".join(f"{frame.filename}:{frame.lineno}, in {frame.name}" for frame in innermost))
        for reason, innermost in frames
    ]


def source_name(source: str) -> str:
    """Return one of Dynamo's source expressions as plain Python code.

    For ``L['self']._modules['norm'].eps`` this is ``self.norm.eps``.
    """
    return re.sub(
        r"^L\['(\w+)'\]", r"\1", re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", source)
    )


def name_in_module(source: str) -> str:
    """Return the name of a weight in its model, such as ``norm.weight``; for other inputs the same as source_name."""
    module = re.split(r"\._(?:modules|parameters|buffers)\[", source)[0]
    return source_name(source).removeprefix(f"{source_name(module)}.")


def mark_unbacked(tensor: torch.Tensor, dim: int, counted: str) -> None:
    """Mark the size of ``dim`` as unbacked, so that it may be 0 or 1.

    counted: a word for the things that the size counts, such as ``tokens``. Dynamo assumes that sizes with the same
        word are equal.
    """
    from torch._dynamo.decorators import mark_unbacked as mark

    mark(tensor, dim, shape_id=counted)


def mark_fixed(tensor: torch.Tensor, dim: int) -> None:
    from torch._dynamo.decorators import mark_static

    mark_static(tensor, dim)


def forget_compiled(method: Callable[..., object]) -> None:
    from torch._C._dynamo.eval_frame import reset_code

    reset_code(inspect.unwrap(method).__code__)


def compile_apart(
    function: Callable[..., object], backend: Callable[..., object], dynamic: bool | None
) -> Any:
    """Return ``torch.compile(function)`` with a cache of its own: it uses no earlier compilation of the function.

    With torch 2.12, earlier compilations still count against Dynamo's limit for the function.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        apart: dict[str, Any] = {"isolate_recompiles": True}
        return torch.compile(function, backend=backend, dynamic=dynamic, **apart)

    # torch 2.12 keeps the entries of two backend objects apart, under one common limit.
    def own_backend(*args: object, **kwargs: object) -> object:
        return backend(*args, **kwargs)

    return torch.compile(function, backend=own_backend, dynamic=dynamic)
