"""The forwards that stand in for those of a module's class. They are attributes of the module itself, so that its
names, its weights, its class and copies of it stay what they are."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer import ops
from dlinfer.errors import InferenceOnlyError
from dlinfer.framework.transformers_ext.fuse import Fused

PLAN = "_dlinfer"
"""The attribute by which a module knows its plan."""


@dataclass
class Plan:
    """What a module runs. name: its path in the model. children: the modules below it, for which the plan was made."""

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

    Raises InferenceOnlyError where gradients are recorded.
    """
    plan: Plan = self._dlinfer  # pyright: ignore[reportAssignmentType]
    fused = plan.fused
    assert fused is not None
    x = args[0] if len(args) == 1 and not kwargs else kwargs.get(fused.argument) if not args else None
    if not isinstance(x, Tensor) or x.dtype != fused.dtype or not _as_planned(self, plan, x.device.type):
        return type(self).forward(self, *args, **kwargs)
    graph = fused.graphs.get(x.dim())
    if graph is None:
        return type(self).forward(self, *args, **kwargs)
    tensors = [_tensor(self, name) for name in fused.names]
    _refuse_gradients(plan.name, x, *tensors)
    return graph.forward(x, *tensors)


def experts_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """All experts by ``fused_moe``: hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, topk].

    Raises InferenceOnlyError where gradients are recorded.
    """
    plan: Plan = self._dlinfer  # pyright: ignore[reportAssignmentType]
    given = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
    gate_up, down = self.gate_up_proj, self.down_proj
    assert isinstance(gate_up, Tensor)
    assert isinstance(down, Tensor)
    if not all(isinstance(one, Tensor) for one in given.values()) or len(given) != 3:
        return type(self).forward(self, *args, **kwargs)
    x, ids, weights = given["hidden_states"], given["top_k_index"], given["top_k_weights"]
    if x.dim() != 2 or x.dtype != gate_up.dtype or not _as_planned(self, plan, x.device.type):
        return type(self).forward(self, *args, **kwargs)
    _refuse_gradients(plan.name, x, weights, gate_up, down)
    return ops.fused_moe(x, gate_up, down, weights, ids, ids.shape[-1], False)


def _as_planned(module: nn.Module, plan: Plan, device: str) -> bool:
    """Whether the module is what it was, computes as in inference, and nobody else casts."""
    if module.training or torch.is_autocast_enabled(device):
        return False
    return all(parent._modules.get(name) is child for parent, name, child in plan.children)


def _tensor(module: nn.Module, path: str) -> Tensor:
    for part in path.split("."):
        module = getattr(module, part)
    assert isinstance(module, Tensor)
    return module


def _refuse_gradients(name: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        raise InferenceOnlyError(what=name)
