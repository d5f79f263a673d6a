"""Experts for LMDeploy: with silu, with limited projections, or with biases and GPT-OSS's clamped activation.

LMDeploy's own dlinfer implementation asserts that there are no biases, and ignores ``act_func``.
"""

from typing import Any

from lmdeploy.pytorch.backends.dlinfer.moe import DlinferFusedMoEImpl
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device.activation import refuse


class Experts(DlinferFusedMoEImpl):
    """Gated experts: with silu, with silu of limited projections, or with biases and a clamped activation."""

    @classmethod
    def from_spec(cls, spec: Any) -> "Experts":
        return cls(spec.top_k, spec.num_experts, spec.renormalize, spec.ep_size, spec.ep_group)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - the base's result is not annotated
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Any,
        gate_up_weights: Tensor,
        down_weights: Tensor,
        gate_up_bias: Any = None,
        down_bias: Any = None,
        expert_list: Any = None,
        act_func: Any = None,
    ) -> Tensor:
        """Return the experts' results [N, hidden] for hidden_states [N, hidden].

        gate_up_bias, down_bias: [experts, 2 * intermediate] and [experts, hidden]; either both or none are given.
        act_func: None for silu; LMDeploy's ``GateupAct``, which has ``alpha`` and ``limit``; or DeepSeek-V4's
            activation, which has ``swiglu_limit``.
        ``dlinfer.ops.fused_moe`` documents the other arguments.
        """
        if gate_up_bias is None and down_bias is None and act_func is None:
            return super().forward(hidden_states, topk_weights, topk_ids, gate_up_weights, down_weights)
        swiglu_limit = getattr(act_func, "swiglu_limit", None)
        if swiglu_limit is not None and gate_up_bias is None and down_bias is None and not self.renormalize:
            weights = (gate_up_weights, down_weights, topk_weights, topk_ids)
            return ops.fused_moe_limited(hidden_states, *weights, float(swiglu_limit))
        alpha, limit = getattr(act_func, "alpha", None), getattr(act_func, "limit", None)
        if gate_up_bias is None or down_bias is None or alpha is None or limit is None or self.renormalize:
            kind = "experts with biases, or with an activation that differs from GPT-OSS's"
            raise refuse(kind, "use another model")
        weights = (gate_up_weights, gate_up_bias, down_weights, down_bias)
        clamp = (float(alpha), float(limit))
        return ops.fused_moe_clamped(hidden_states, *weights, topk_weights, topk_ids, *clamp)
