"""Experts whose weights are of 4 bits, for LMDeploy's layer of compressed-tensors and for ours of AWQ's layout.

LMDeploy has an implementation for CUDA alone. Here both layers hand over AWQ's layout, which the op reads in place.
"""

from typing import Any

from lmdeploy.pytorch.backends.moe import FusedMoEW4A16Impl
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device.activation import refuse


class FusedMoEW4A16(FusedMoEW4A16Impl):
    """Gated experts with silu, whose weights lie as ``ops.quantised.packing.AWQ`` says."""

    def __init__(self, top_k: int, renormalize: bool, group_size: int) -> None:
        self.top_k, self.renormalize, self.group_size = top_k, renormalize, group_size

    @classmethod
    def from_spec(cls, spec: Any) -> "FusedMoEW4A16":
        """From LMDeploy's FusedMoEW4A16BuildSpec. Raises UnsupportedFeatureError for what no op serves."""
        if spec.ep_size > 1:
            raise refuse(f"expert parallelism (ep_size={spec.ep_size})", "set ep=1")
        if spec.num_bits != 4:
            raise refuse(f"packed experts of {spec.num_bits} bits", "use a model of 4 bits")
        return cls(spec.top_k, spec.renormalize, spec.group_size)

    def forward(  # zero points are for our own layer
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Any,
        gate_up_packed: Tensor,
        gate_up_scale: Tensor,
        down_packed: Tensor,
        down_scale: Tensor,
        gate_up_zeros: Tensor | None = None,
        down_zeros: Tensor | None = None,
    ) -> Tensor:
        """hidden_states [tokens, hidden] -> the same shape; ``dlinfer.ops.fused_moe_w4a16`` documents the rest."""
        return ops.fused_moe_w4a16(
            hidden_states,
            gate_up_packed,
            gate_up_scale,
            gate_up_zeros,
            down_packed,
            down_scale,
            down_zeros,
            topk_weights,
            topk_ids,
            self.top_k,
            self.renormalize,
            self.group_size,
        )
