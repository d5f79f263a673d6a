"""The forwards that stand in for those of a module's class. They are attributes of the module itself, so that its
names, its weights, its class and copies of it stay what they are. A call that no plan was made for runs the class's
forward under the fallback policy."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer import ops, settings
from dlinfer.errors import InferenceOnlyError, ModuleFallbackError
from dlinfer.framework.transformers_ext.fuse import Fused
from dlinfer.ops.core import fallback

PLAN = "_dlinfer"
"""Attribute of a module that holds its plan."""


@dataclass
class Plan:
    """The fused forward of a module. name: its path in the model. children: the modules below it at planning time."""

    name: str
    fused: Fused | None
    children: list[tuple[nn.Module, str, nn.Module]]


def make_plan(name: str, module: nn.Module, fused: Fused | None) -> Plan:
    """The plan of a module as it is now."""
    below = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if child is not None
    ]
    return Plan(name, fused, below)


def fused_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the graph for the input's dimensions; the class's own forward for what no graph was made for.

    Raises InferenceOnlyError where gradients are recorded, ModuleFallbackError where the class's own forward would run
    and the fallback policy is ``error``.
    """
    plan: Plan = self._dlinfer  # pyright: ignore[reportAssignmentType]
    fused = plan.fused
    assert fused is not None
    x = args[0] if len(args) == 1 and not kwargs else kwargs.get(fused.argument) if not args else None
    if not isinstance(x, Tensor):
        return _own_forward(self, plan, "it is called with other than one tensor", args, kwargs)
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
    """All experts by ``fused_moe``: hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, topk].

    Raises as ``fused_forward``.
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
    """A linear layer by ``linear``. Under a compiler it is torch's, which graph mode merges with its neighbours.

    Raises as ``fused_forward``.
    """
    plan: Plan = self._dlinfer  # pyright: ignore[reportAssignmentType]
    x = args[0] if len(args) == 1 and not kwargs else kwargs.get("input") if not args else None
    if torch.compiler.is_compiling():
        return type(self).forward(self, *args, **kwargs)
    if not isinstance(x, Tensor):
        return _own_forward(self, plan, "it is called with other than one tensor", args, kwargs)
    weight, bias = self.weight, self.bias
    reason = _changed(self, plan, x.device.type) or _other_dtype(x, weight.dtype)
    if reason is not None:
        return _own_forward(self, plan, reason, args, kwargs)
    _refuse_gradients(plan.name, x, weight)
    return ops.linear.overload(x, weight, bias)


def _changed(module: nn.Module, plan: Plan, device: str) -> str | None:
    """Why a module's plan does not hold now, whatever it is given; None where it does."""
    if module.training:
        return "it is in training"
    if torch.is_autocast_enabled(device):
        return "autocast is on"
    if not all(parent._modules.get(name) is child for parent, name, child in plan.children):
        return "a module below it was replaced"
    return None


def _other_dtype(x: Tensor, dtype: torch.dtype) -> str | None:
    return None if x.dtype == dtype else f"its input is {x.dtype}, and its weights are {dtype}"


def _own_forward(
    module: nn.Module, plan: Plan, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The class's forward, counted. A compiler is left to itself: graph mode fuses what it traces."""
    if not torch.compiler.is_compiling():
        kind = type(module).__name__
        fallback.settle(
            fallback.Fallback(kind, "transformers", reason),
            settings.current().fallback,
            lambda: ModuleFallbackError(module=plan.name, kind=kind, reason=reason),
            lambda: (
                f"{plan.name} ({kind}) was optimized and runs its class's own forward: {reason}. Said once; "
                "DLINFER_FALLBACK=error refuses instead."
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
