"""Capture a Dynamo graph, or any function, as a graph in dlinfer's dialect.

A Dynamo graph calls torch's Python API. The capture replays these calls and records ATen ops before dispatch. So an op
with a kernel of its own is not decomposed: ``linear`` stays ``linear``. An in-place write stays a write, while
AOTAutograd would clone the KV cache.
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
from dlinfer.graph.ir.dialect import STATIC, attribute, gives_something, is_pure, model_line, op_name
from dlinfer.graph.torch_private.dynamo import SET_GRAD_ENABLED, is_static_input
from dlinfer.graph.torch_private.fake_mode import (
    FakeTensor,
    FakeTensorMode,
    is_traceable_wrapper_subclass,
    trace_coarse,
)


@dataclass(frozen=True)
class Captured:
    """A graph in dlinfer's dialect (ATen ops before dispatch, with in-place writes).

    fakes: the fakes of the graph's inputs, in call order. mode: the fake mode of these fakes.
    """

    graph_module: fx.GraphModule
    fakes: tuple[object, ...]
    mode: FakeTensorMode


_AUTOCAST = ("_enter_autocast", "_exit_autocast")
_CHECKPOINT = "tag_activation_checkpoint"
_DERIVATIVES = ("_autograd_grad", "_grad_increment_nesting", "_jvp_increment_nesting")
_INFERENCE_MODE = ("_enter_inference_mode", "_exit_inference_mode")
_UNKNOWN_LINE = "an unknown line"


def capture(
    dynamo_graph: fx.GraphModule, fakes: Sequence[object], mode: FakeTensorMode, *, keep_floats: bool = True
) -> Captured:
    """Capture a Dynamo graph. Raises CaptureError with the reason and the line of the model's source.

    fakes: a fake for each input.
    keep_floats: whether floats that may change become dynamic inputs. If False, the graph specializes on their values.
    """
    for value in fakes:
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise CaptureError(reason=f"an input has layout {value.layout}", line="the call")
        if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
            raise CaptureError(
                reason=f"an input is a {type(value).__name__}, a tensor subclass", line="the call"
            )
    nodes = dynamo_graph.graph.nodes
    for node in nodes:
        if _name(node.target) in _DERIVATIVES:
            raise _refusal(node, "it computes derivatives with torch.func, but graphs are for inference only")
    replay = _Replay(dynamo_graph, changing_floats(dynamo_graph.graph) if keep_floats else set())
    captured = trace(
        replay.run, fakes, mode, decomposed=bool(autocast()) or any(map(_changes_dispatch, nodes))
    )
    for new, old in zip(
        captured.graph_module.graph.find_nodes(op="placeholder"),
        dynamo_graph.graph.find_nodes(op="placeholder"),
        strict=True,
    ):
        new._rename(old.name)
        new.meta[STATIC] = is_static_input(old)
    captured.graph_module.recompile()
    return captured


def _refusal(node: fx.Node, reason: str) -> CaptureError:
    return CaptureError(reason=reason, line=model_line(node) or _UNKNOWN_LINE)


def _name(target: object) -> str:
    return getattr(target, "__name__", "")


def _changes_dispatch(node: fx.Node) -> bool:
    """Return whether a node changes how torch dispatches ops, as autocast and vmap do."""
    module = getattr(node.target, "__module__", None) or ""
    return _name(node.target) in _AUTOCAST or module.startswith("torch._functorch")


def trace(
    function: Callable[..., object],
    fakes: Sequence[object],
    mode: FakeTensorMode,
    *,
    decomposed: bool = False,
) -> Captured:
    """Trace ``function`` on fake inputs of ``mode``. Raises CaptureError.

    decomposed: trace after dispatch, which decomposes ops such as ``linear``; see ``trace_coarse``.
    """
    try:
        with traceback.preserve_node_meta():
            graph_module = trace_coarse(function, fakes, mode, decomposed=decomposed)
    except CaptureError:
        raise
    except Exception as cause:  # whatever an op's fake function raises, the reason is what the user needs
        reason = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause) else ''}"
        raise CaptureError(reason=reason, line=getattr(cause, "model_line", _UNKNOWN_LINE)) from cause
    # No tensor here has a gradient, so switches of the grad mode have no effect.
    for node in graph_module.graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED):
        graph_module.graph.erase_node(node)
    _refuse_read_indices(graph_module)
    _drop_without_result(graph_module.graph)
    refuse_lazy_constants(graph_module)
    _refuse_fake_constants(graph_module)
    return Captured(graph_module, tuple(fakes), mode)


def _refuse_read_indices(graph_module: fx.GraphModule) -> None:
    """Raise CaptureError if an index is a 0-d tensor.

    torch would read the number in this tensor during capture, and later calls would use the same number.
    """
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default):
        if "val" not in node.meta:
            raise _refusal(node, "an index is a 0-d tensor, and torch would read its value during capture")


def _drop_without_result(graph: fx.Graph) -> None:
    """Drop calls whose result is neither a tensor nor a number, such as ``promote_types``.

    Python has already used the result during tracing. Raises CaptureError if a node of the graph reads the result too,
    or if the call has an effect besides its result.
    """
    for node in reversed(graph.nodes):
        if node.op != "call_function" or "val" in node.meta or not gives_something(node):
            continue
        if node.users or not is_pure(node):
            raise _refusal(node, f"{op_name(node)} returns something that is neither a tensor nor a number")
        graph.erase_node(node)


def _refuse_fake_constants(graph_module: fx.GraphModule) -> None:
    """Raise CaptureError if a constant is a fake tensor. Untraced code made this tensor, and it has no values."""
    for node in graph_module.graph.find_nodes(op="get_attr"):
        if isinstance(attribute(graph_module, str(node.target)), FakeTensor):
            user = next(iter(node.users), node)
            raise _refusal(user, "it uses a tensor that torch computes without recording how")


class _Replay(fx.Interpreter):
    """Runs a Dynamo graph node by node, so that each recorded op keeps the line of the model's source."""

    def __init__(self, graph_module: fx.GraphModule, changing: Set[fx.Node]) -> None:
        super().__init__(graph_module)
        self._changing = changing
        self._floats: set[fx.Node] = set()

    def _run_on_floats(self, node: fx.Node) -> object:
        """Run a node that reads float inputs.

        The node runs on the floats' 0-d tensors if possible. Otherwise it runs on the floats' values, which adds a
        guard.
        """
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        result = on_floats(node, args, kwargs, tuple(argument in self._floats for argument in node.args))
        if result is not None:
            if isinstance(node.meta.get("example_value"), torch.SymFloat):
                self._floats.add(node)
            return result
        args, kwargs = map_arg((node.args, node.kwargs), self._valued)
        return getattr(self, node.op)(node.target, args, kwargs)

    def _valued(self, node: fx.Node) -> Any:
        return float(node.meta["example_value"]) if node in self._floats else self.env[node]

    def run_node(self, n: fx.Node) -> object:
        try:
            if is_float_read(n):
                if n.args[0] in self._changing:
                    self._floats.add(n)
                    return self.env[n.args[0]]  # pyright: ignore[reportArgumentType]
                # Dynamo passes a module's float (LayerNorm.eps) as a 0-d tensor and reads it with item().
                # float() of its symbol makes it a constant and adds the guard Eq(symbol, value).
                return float(n.meta["example_value"])
            if n.target is SET_GRAD_ENABLED or _name(n.target) in _INFERENCE_MODE:
                return None  # no tensor has a gradient: the backend has checked that
            if not self._floats.isdisjoint(n.all_input_nodes):
                return self._run_on_floats(n)
            return super().run_node(n)
        except CaptureError:
            raise
        except Exception as cause:
            if not hasattr(cause, "model_line"):
                cause.model_line = model_line(n) or _UNKNOWN_LINE  # pyright: ignore[reportAttributeAccessIssue]
            raise

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if target in (F.dropout, torch.dropout):
            call = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
            if not call.get("training", call.get("train", True)) or call.get("p") == 0:
                # Here dropout returns its input itself, but a fake result would have memory of its own.
                return call["input"]
        if _name(target) == "_get_data_attr":
            return args[0].detach()  # ``x.data``, which torch does not trace
        if _name(target) == "shallow_copy_data_":
            # Newer torch writes ``x.data = y`` so. This op has no tag that tells its effect, and torch's cache of fakes
            # forgets the effect too.
            return args[0].set_(args[1])
        if _name(target) == _CHECKPOINT:
            return args[0](*args[1:])  # a checkpoint only affects backward; the first argument is its body
        return super().call_function(target, args, kwargs)
