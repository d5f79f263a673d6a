"""Find MoE modules that transformers' ExpertsInterface dispatches and that ``fused_moe`` can compute."""

import torch.nn.functional as F
from torch import Tensor, nn

from dlinfer.framework.transformers_ext.fuse import NotFused

_LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes that transformers' ``use_experts_implementation`` sets on an experts module."""


def are_dispatched(module: nn.Module) -> bool:
    """Return whether ExpertsInterface dispatches the forward of a module."""
    return all(isinstance(module.__dict__.get(name), bool) for name in _LAYOUT)


def refuse_others(module: nn.Module) -> None:
    """Raise NotFused unless the experts compute ``down(silu(gate) * up)`` from one weight that stacks gate and up.

    The stacked weight is [experts, 2 * intermediate, hidden].
    """
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    if not module.has_gate or not module.is_concatenated or module.is_transposed:
        raise NotFused("its experts' weights do not stack gate above up")
    if module.has_bias or getattr(module, "has_post_expert_norm", False):
        raise NotFused("its experts have biases or norms")
    if getattr(module, "_is_expert_parallel", False):
        raise NotFused("its experts are split over processes")
    if getattr(type(module), "_apply_gate", None) is not _default_apply_gate:
        raise NotFused("its experts have another kind of gate")
    activation = getattr(module, "act_fn", None)
    if activation is not F.silu and not isinstance(activation, (nn.SiLU, SiLUActivation)):
        raise NotFused("its experts' activation is not silu")
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(
        isinstance(weight, Tensor) and weight.dim() == 3 and weight.is_floating_point() for weight in weights
    ):
        raise NotFused("its experts' weights are not three-dimensional floating-point tensors")
