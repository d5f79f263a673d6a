"""Forwards on dlinfer's ops, which replace the forward that a module inherits from its class.

The new forward is an attribute of the module instance. So the module's class, names, weights and copies do not change.
If a call cannot use the new forward, the forward of the class runs, under the fallback policy.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer import ops, settings
from dlinfer.errors import InferenceOnlyError, ModuleFallbackError
from dlinfer.framework.transformers_ext.fuse import Fused
from dlinfer.ops.core import fallback

PLAN = "_dlinfer"
"""The attribute of a module that holds its Plan."""


@dataclass
class Plan:
    """The data of a module's replaced forward.

    name: the module's path in the model. fused: the traced graphs; None for experts and linear layers.
    children: (parent, name, child) for each module below the module, as they were when the forward was replaced.
    """

    name: str
    fused: Fused | None
    children: list[tuple[nn.Module, str, nn.Module]]


def make_plan(name: str, module: nn.Module, fused: Fused | None) -> Plan:
    below = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if child is not None
    ]
    return Plan(name, fused, below)


def fused_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the fused graph for the input's number of dimensions.

    If there is no such graph, run the forward of the class.

    Raises InferenceOnlyError if torch records gradients. Under the fallback policy ``error``, raises
    ModuleFallbackError in place of a run of the class's forward.
    """
    plan: Plan = self._dlinfer  # pyright: ignore[reportAssignmentType]
    fused = plan.fused
    assert fused is not None
    x = args[0] if len(args) == 1 and not kwargs else kwargs.get(fused.argument) if not args else None
    if not isinstance(x, Tensor):
        return _own_forward(self, plan, "it is not called with exactly one tensor", args, kwargs)
    reason = _changed(self, plan, x.device.type) or _other_dtype(x, fused.dtype)
    if reason is not None:
        return _own_forward(self, plan, reason, args, kwargs)
    graph = fused.graphs.get(x.dim())
    if graph is None:
        return _own_forward(self, plan, f"its input has {x.dim()} dimensions", args, kwargs)
    tensors = [_tensor(self, name) for name in fused.names]
    _refuse_gradients(plan.name, x, *tensors)
    return graph.forward(x, *tensors)


def experts_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the weighted sum of each token's experts, [tokens, hidden], computed by ``fused_moe``.

    Takes hidden_states [tokens, hidden], top_k_index [tokens, topk] and top_k_weights [tokens, topk]. Raises the errors
    of ``fused_forward``.
    """
    plan: Plan = self._dlinfer  # pyright: ignore[reportAssignmentType]
    arguments = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
    gate_up, down = self.gate_up_proj, self.down_proj
    assert isinstance(gate_up, Tensor)
    assert isinstance(down, Tensor)
    if not all(isinstance(value, Tensor) for value in arguments.values()) or len(arguments) != 3:
        return _own_forward(self, plan, "it is not called with three tensors", args, kwargs)
    x, ids, weights = arguments["hidden_states"], arguments["top_k_index"], arguments["top_k_weights"]
    reason = _changed(self, plan, x.device.type) or _other_dtype(x, gate_up.dtype)
    if reason is None and x.dim() != 2:
        reason = f"its input has {x.dim()} dimensions"
    if reason is not None:
        return _own_forward(self, plan, reason, args, kwargs)
    _refuse_gradients(plan.name, x, weights, gate_up, down)
    return ops.fused_moe(x, gate_up, down, weights, ids, ids.shape[-1], False)


def linear_forward(self: nn.Linear, *args: Any, **kwargs: Any) -> Any:
    """Compute a linear layer with the op ``linear``. Under a compiler, call torch's linear, which graph mode can fuse.

    Raises the same errors as ``fused_forward``.
    """
    plan: Plan = self._dlinfer  # pyright: ignore[reportAssignmentType]
    x = args[0] if len(args) == 1 and not kwargs else kwargs.get("input") if not args else None
    if torch.compiler.is_compiling():
        return type(self).forward(self, *args, **kwargs)
    if not isinstance(x, Tensor):
        return _own_forward(self, plan, "it is not called with exactly one tensor", args, kwargs)
    weight, bias = self.weight, self.bias
    reason = _changed(self, plan, x.device.type) or _other_dtype(x, weight.dtype)
    if reason is not None:
        return _own_forward(self, plan, reason, args, kwargs)
    _refuse_gradients(plan.name, x, weight)
    return ops.linear.overload(x, weight, bias)


def _changed(module: nn.Module, plan: Plan, device: str) -> str | None:
    """Return a reason not to use the replaced forward now: training, autocast or a replaced child; else None."""
    if module.training:
        return "it is in training mode"
    if torch.is_autocast_enabled(device):
        return "autocast is on"
    if not all(parent._modules.get(name) is child for parent, name, child in plan.children):
        return "a module below it was replaced"
    return None


def _other_dtype(x: Tensor, dtype: torch.dtype) -> str | None:
    return None if x.dtype == dtype else f"its input is {x.dtype}, but its weights are {dtype}"


def _own_forward(
    module: nn.Module, plan: Plan, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the forward of the module's class, and record a fallback. reason: why the new forward is not used.

    Nothing is recorded while a compiler traces, because graph mode fuses the ops of the class's forward.
    """
    if not torch.compiler.is_compiling():
        kind = type(module).__name__
        fallback.settle(
            fallback.Fallback(kind, "transformers", reason),
            settings.current().fallback,
            lambda: ModuleFallbackError(module=plan.name, kind=kind, reason=reason),
            lambda: (
                f"{plan.name} ({kind}) was optimized, but runs its class's own forward: {reason}. Logged once; "
                "DLINFER_FALLBACK=error raises an error instead."
            ),
        )
    return type(module).forward(module, *args, **kwargs)


def _tensor(module: nn.Module, path: str) -> Tensor:
    for part in path.split("."):
        module = getattr(module, part)
    assert isinstance(module, Tensor)
    return module


def _refuse_gradients(name: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise InferenceOnlyError(what=name)
