"""Linear layers and experts with weights of 4 bits, in the layout ``ops.quantised.packing.AWQ``.

LMDeploy's linear layer for dlinfer ignores the process group of an all-reduce, and reads weights of any bit width as
4-bit. LMDeploy has 4-bit experts for CUDA only. Here weights stay as they are loaded: projections that LMDeploy fuses
(q, k and v, or gate and up) are concatenated along out_features.
"""

from typing import Any

from lmdeploy.pytorch.backends.awq_modules import LinearW4A16Impl
from lmdeploy.pytorch.backends.moe import FusedMoEW4A16Impl
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.from_spec import FromSpec


class LinearW4A16(FromSpec, LinearW4A16Impl):
    """A linear layer of 4-bit weights: x @ weight + bias. Raises UnsupportedFeatureError for other widths."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        if spec.w_bit != 4:
            raise refuse(f"AWQ weights of {spec.w_bit} bits", "use a 4-bit model")

    # The abstract method of LMDeploy knows neither scales nor zero points.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor,
        qweight: Tensor,
        scales: Tensor,
        qzeros: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
    ) -> Tensor:
        """Return a new tensor [..., out] of x's dtype.

        x: [..., in]. qweight: int32 [in, out / 8]. qzeros: int32 [groups, out / 8]. scales [groups, out] and bias
        [out]: float16 in any model.
        """
        parallel: dict[str, Any] = {"all_reduce": all_reduce, "group": group}
        size = self.spec.group_size
        return ops.weight_quant_matmul(
            x, qweight, scales, offset=qzeros, bias=bias, group_size=size, **parallel
        )


class FusedMoEW4A16(FromSpec, FusedMoEW4A16Impl):
    """Gated experts with silu, for LMDeploy's layer of compressed-tensors and for our layer of AWQ.

    Raises UnsupportedFeatureError for expert parallelism and for other widths than 4 bits.
    """

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        if spec.ep_size > 1:
            raise refuse(f"expert parallelism (ep_size={spec.ep_size})", "set ep=1")
        if spec.num_bits != 4:
            raise refuse(f"packed experts of {spec.num_bits} bits", "use a 4-bit model")

    def forward(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Any, *weights: Tensor, **unused: Any
    ) -> Tensor:
        """Return a tensor of hidden_states' shape [tokens, hidden].

        weights: the packed weights (int32) and scales of gate_up, then those of down. For our own layer, zero points
        follow the scales, both of gate_up and of down. ``ops.fused_moe_w4a16`` documents the other arguments.
        """
        half, spec = len(weights) // 2, self.spec
        zeros = (None,) if half == 2 else ()
        parts = (*weights[:half], *zeros, *weights[half:], *zeros)
        router = (topk_weights, topk_ids, spec.top_k, spec.renormalize)
        return ops.fused_moe_w4a16(hidden_states, *parts, *router, spec.group_size)
