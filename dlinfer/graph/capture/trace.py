"""Capture: a Dynamo graph, or any function, as a graph in the dialect.

Dynamo's graph speaks torch's Python API in its many spellings. Replaying it before dispatch gives one spelling,
ATen's, without splitting the ops that engines have kernels for: ``linear`` stays ``linear`` and a write stays a
write (AOT autograd would make it a clone of the cache).
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx import traceback
from torch.fx.node import map_arg

from dlinfer.errors import CaptureError
from dlinfer.graph.capture.float_inputs import changing_floats, is_float_read, on_floats
from dlinfer.graph.ir.conj_neg import refuse_lazy_constants
from dlinfer.graph.ir.device import autocast
from dlinfer.graph.ir.dialect import STATIC, gives_something, is_pure, model_line, op_name
from dlinfer.graph.ir.program import attribute
from dlinfer.graph.torch_private.dynamo import SET_GRAD_ENABLED, is_static_input
from dlinfer.graph.torch_private.fake_mode import (
    FakeTensor,
    FakeTensorMode,
    is_traceable_wrapper_subclass,
    trace_coarse,
)


@dataclass(frozen=True)
class Captured:
    """A graph in the dialect with its inputs' fakes, in the order in which it is called."""

    graph_module: fx.GraphModule
    fakes: tuple[Any, ...]
    mode: FakeTensorMode


_AUTOCAST = ("_enter_autocast", "_exit_autocast")


def capture(
    dynamo_graph: fx.GraphModule, fakes: Sequence[object], mode: FakeTensorMode, *, keep_floats: bool = True
) -> Captured:
    """The dialect's form of a graph of torch calls. Raises CaptureError with the reason and the model's line.

    keep_floats: floats that change are inputs of the graph; otherwise it takes and guards their values.
    """
    _refuse_exotic(fakes)
    _refuse_derivatives(dynamo_graph)
    replay = _Replay(dynamo_graph, changing_floats(dynamo_graph.graph) if keep_floats else set())
    decomposed = bool(autocast()) or any(map(_acts_below, dynamo_graph.graph.nodes))
    captured = trace(replay.run, fakes, mode, decomposed=decomposed)
    for new, old in zip(
        captured.graph_module.graph.find_nodes(op="placeholder"),
        dynamo_graph.graph.find_nodes(op="placeholder"),
        strict=True,
    ):
        new._rename(old.name)
        new.meta[STATIC] = is_static_input(old)
    captured.graph_module.recompile()
    return captured


def _acts_below(node: fx.Node) -> bool:
    """Whether a node changes what ops mean between their call and their kernels: autocast's casts, vmap's batching."""
    module = getattr(node.target, "__module__", None) or ""
    return getattr(node.target, "__name__", "") in _AUTOCAST or module.startswith("torch._functorch")


def trace(
    function: Callable[..., object],
    fakes: Sequence[object],
    mode: FakeTensorMode,
    *,
    decomposed: bool = False,
) -> Captured:
    """Record what ``function`` calls on fake inputs of ``mode``. Raises CaptureError."""
    try:
        with traceback.preserve_node_meta():
            graph_module = trace_coarse(function, fakes, mode, decomposed=decomposed)
    except CaptureError:
        raise
    except Exception as cause:  # whatever an op's fake function raises, the reason is what the user needs
        reason = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause) else ''}"
        raise CaptureError(reason=reason, line=getattr(cause, "model_line", "an unknown line")) from cause
    _forget_grad_mode(graph_module)
    _refuse_read_indices(graph_module)
    _drop_without_result(graph_module.graph)
    refuse_lazy_constants(graph_module)
    _refuse_fake_constants(graph_module)
    return Captured(graph_module, tuple(fakes), mode)


def _forget_grad_mode(graph_module: fx.GraphModule) -> None:
    """Nothing here has a gradient. Switches are recorded where the function has them, and where a generator that holds
    ``no_grad`` is collected meanwhile."""
    for node in graph_module.graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED):
        graph_module.graph.erase_node(node)


def _refuse_read_indices(graph_module: fx.GraphModule) -> None:
    """Indexing by a tensor without dimensions reads its number, which a graph would keep from its first call."""
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default):
        if "val" not in node.meta:
            line = model_line(node) or "an unknown line"
            raise CaptureError(
                reason="an index is a tensor without dimensions, of which torch reads the number", line=line
            )


def _drop_without_result(graph: fx.Graph) -> None:
    """Drop calls without a tensor result, such as ``promote_types``. Torch made them while it traced, and later nodes
    hold their answers. Raises CaptureError where a node reads such a result."""
    for node in reversed(graph.nodes):
        if node.op != "call_function" or "val" in node.meta or not gives_something(node):
            continue
        if node.users or not is_pure(node):
            line = model_line(node) or "an unknown line"
            raise CaptureError(reason=f"{op_name(node)} gives what has no place in a graph", line=line)
        graph.erase_node(node)


def _refuse_fake_constants(graph_module: fx.GraphModule) -> None:
    """A fake tensor that no op of the graph gave was made where torch does not record, and has no values."""
    for node in graph_module.graph.find_nodes(op="get_attr"):
        if isinstance(attribute(graph_module, str(node.target)), FakeTensor):
            user = next(iter(node.users), node)
            raise CaptureError(
                reason="it uses a tensor that torch computes without recording how",
                line=model_line(user) or "an unknown line",
            )


def _refuse_exotic(fakes: Sequence[object]) -> None:
    for value in fakes:
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout != torch.strided:
            raise CaptureError(reason=f"an input is a tensor of layout {value.layout}", line="the call")
        if is_traceable_wrapper_subclass(value):
            raise CaptureError(reason=f"an input is a {type(value).__name__}", line="the call")


_DERIVATIVES = ("_autograd_grad", "_grad_increment_nesting", "_jvp_increment_nesting")


def _refuse_derivatives(dynamo_graph: fx.GraphModule) -> None:
    for node in dynamo_graph.graph.nodes:
        if getattr(node.target, "__name__", "") in _DERIVATIVES:
            line = model_line(node) or "an unknown line"
            raise CaptureError(
                reason="it differentiates with torch.func, and graphs are for inference", line=line
            )


class _Replay(fx.Interpreter):
    """Runs a Dynamo graph node by node, so that each recorded op keeps the model's line."""

    def __init__(self, graph_module: fx.GraphModule, changing: Set[fx.Node]) -> None:
        super().__init__(graph_module)
        self._changing = changing
        self._floats: set[fx.Node] = set()

    def _run_on_floats(self, node: fx.Node) -> Any:
        """A node that reads floats that came in: on their tensors, or on their values, which are guarded."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        result = on_floats(node, args, kwargs, tuple(one in self._floats for one in node.args))
        if result is not None:
            if isinstance(node.meta.get("example_value"), torch.SymFloat):
                self._floats.add(node)
            return result
        args, kwargs = map_arg((node.args, node.kwargs), self._valued)
        return getattr(self, node.op)(node.target, args, kwargs)

    def _valued(self, node: fx.Node) -> Any:
        return float(node.meta["example_value"]) if node in self._floats else self.env[node]

    def run_node(self, n: fx.Node) -> Any:
        try:
            if is_float_read(n):
                if n.args[0] in self._changing:
                    self._floats.add(n)
                    return self.env[n.args[0]]  # pyright: ignore[reportArgumentType]
                # Dynamo passes a module's float (LayerNorm.eps) as a 0-d tensor and reads it by item().
                # Asking its symbol for the value folds it and adds the guard Eq(symbol, value).
                return float(n.meta["example_value"])
            if n.op == "call_function" and _sets_gradients(n):
                return None  # nothing here has a gradient: the backend made sure
            if not self._floats.isdisjoint(n.all_input_nodes):
                return self._run_on_floats(n)
            return super().run_node(n)
        except CaptureError:
            raise
        except Exception as cause:
            if not hasattr(cause, "model_line"):
                cause.model_line = model_line(n) or "an unknown line"  # pyright: ignore[reportAttributeAccessIssue]
            raise

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (F.dropout, torch.dropout):
            given = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
            if not given.get("training", given.get("train", True)) or given.get("p") == 0:
                # The kernel gives its input back, but the fake result would be memory of its own.
                return given["input"]
        if getattr(target, "__name__", "") == "_get_data_attr":
            return args[0].detach()  # ``x.data``, which torch itself does not record
        if getattr(target, "__name__", "") == _CHECKPOINT:
            return args[0](*args[1:])  # it is about what backward keeps; the graph of the body comes first
        return super().call_function(target, args, kwargs)


_CHECKPOINT = "tag_activation_checkpoint"
_INFERENCE_MODE = ("_enter_inference_mode", "_exit_inference_mode")


def _sets_gradients(node: fx.Node) -> bool:
    """Whether a node turns the recording of gradients on or off, as ``no_grad`` and ``inference_mode`` do."""
    name = getattr(node.target, "__name__", "")
    return node.target is SET_GRAD_ENABLED or name in _INFERENCE_MODE
