"""Layers of 8-bit weights and activations for LMDeploy: W8A8 (smooth_quant), blocked FP8 and static FP8.

LMDeploy's dlinfer layers of W8A8 round the experts' scales to bfloat16, support only int8 experts, and may transpose
weights. LMDeploy has no dlinfer layers of FP8. Here weights stay as they are loaded.
"""

from typing import Any, ClassVar

import torch.distributed
from lmdeploy.pytorch.backends.blockedf8_modules import LinearBlockedF8Impl
from lmdeploy.pytorch.backends.moe import FusedMoEBlockedF8Impl, FusedMoEStaticF8Impl, FusedMoEW8A8Impl
from lmdeploy.pytorch.backends.qmodules import LinearW8A8Impl, RMSNormW8A8Impl
from lmdeploy.pytorch.backends.static_fp8_modules import LinearStaticF8Impl
from lmdeploy.pytorch.models.q_modules import QTensor
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.from_spec import FromSpec
from dlinfer.ops.linear.dense import reduced

_UNQUANTISED = "use the unquantised model in bfloat16 or float32"
_W8A8 = (torch.int8, torch.float8_e4m3fn)


class _EightBit(FromSpec):
    """Base of 8-bit layers. served: the dtypes that weights may have.

    Raises UnsupportedFeatureError for other dtypes, expert parallelism and unusual activations: no op serves them.
    """

    served: ClassVar[tuple[torch.dtype, ...]] = (torch.float8_e4m3fn,)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        dtype = spec.fp8_dtype if hasattr(spec, "fp8_dtype") else spec.quant_dtype
        if dtype not in self.served:
            raise refuse(f"weights quantised to {dtype}", _UNQUANTISED)
        if getattr(spec, "ep_size", 1) > 1:
            raise refuse(f"expert parallelism (ep_size={spec.ep_size})", "set ep=1")
        if getattr(spec, "custom_gateup_act", False):
            raise refuse("quantised experts with an unusual activation", _UNQUANTISED)


# --- a norm and linear layers


class RMSNormW8A8(_EightBit, RMSNormW8A8Impl):
    """An RMS norm with a quantised result, for the linear layers that follow."""

    served = _W8A8

    def forward(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of x [..., hidden] as a QTensor.

        With a residual, return the norm of x + residual as a QTensor, and x + residual.
        """
        settings = (weight, self.spec.eps, self.spec.quant_dtype)
        if residual is None:
            return QTensor(*ops.rms_norm_w8a8(x, *settings))
        numbers, scale, total = ops.add_rms_norm_w8a8(x, residual, *settings)
        return QTensor(numbers, scale), total


class LinearW8A8(_EightBit, LinearW8A8Impl):
    """A linear layer of 8-bit weights with a scale for each row. Floating-point input is quantised for each token."""

    served = _W8A8

    def forward(
        self,
        x: Any,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
    ) -> Tensor:
        """Return [..., out] of the model's dtype. x: QTensor or float [..., in]. weight: [out, in]. scale: [out, 1]."""
        dtype = self.spec.quant_dtype
        if isinstance(x, QTensor):
            numbers, by = x.tensor, x.scale
        else:
            numbers, by = _of_all_ranks(x, dtype, group) if all_reduce else ops.dynamic_quant(x, dtype)
        out = ops.linear_w8a8(numbers, weight, by, scale, self.spec.output_dtype, dtype, bias)
        return reduced(out, all_reduce, group)


def _of_all_ranks(x: Tensor, dtype: torch.dtype, group: Any) -> tuple[Tensor, Tensor]:
    """Quantise this rank's part of each token with the scale of the whole token, as without tensor parallelism.

    x: [..., this rank's part of hidden]. The ranks exchange the largest absolute value of each token. ``dynamic_quant``
    gets it as one more column, which is cut off again.
    """
    place, count = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    largest = x.new_zeros(*x.shape[:-1], count)
    largest[..., place] = x.abs().amax(-1)
    largest = ops.all_reduce(largest, group).amax(-1, keepdim=True)
    numbers, scale = ops.dynamic_quant(torch.cat([x, largest], -1), dtype)
    return numbers[..., :-1], scale


class LinearBlockedF8(_EightBit, LinearBlockedF8Impl):
    """A linear layer of float8 weights with a scale for each block."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
        *unused: Any,
        **more: Any,
    ) -> Tensor:
        """Return [..., out]. x: [..., in]. weight: [out, in]. scale: [out / block, in / block]."""
        settings = (self.spec.block_size, self.spec.scale_fmt == "ue8m0")
        return reduced(ops.linear_blocked_fp8(x, weight, scale, bias, *settings), all_reduce, group)


class LinearStaticF8(_EightBit, LinearStaticF8Impl):
    """A linear layer of float8 weights with a scale for each row, and one fixed scale for its input."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        input_scale: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
        *unused: Any,
        **more: Any,
    ) -> Tensor:
        """Return [..., out]. x: [..., in]. weight: [out, in]. input_scale: [1]. weight_scale: [out]."""
        return reduced(ops.linear_static_fp8(x, weight, weight_scale, input_scale, bias), all_reduce, group)


# --- experts: hidden_states [tokens, hidden] -> the same shape. LMDeploy's declarations differ from its calls.


class FusedMoEW8A8(_EightBit, FusedMoEW8A8Impl):
    served = _W8A8

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, *weights: Any, **unused: Any
    ) -> Tensor:
        """Return the experts' results.

        weights: gate_up, scales of gate_up, down, scales of down, and a list that is ignored.
        """
        router = (topk_weights, topk_ids, self.spec.top_k, self.spec.renormalize)
        return ops.fused_moe_w8a8(hidden_states, *weights[:4], *router)


class FusedMoEBlockedF8(_EightBit, FusedMoEBlockedF8Impl):
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, *weights: Tensor, **more: Any
    ) -> Tensor:
        """Return the experts' results. weights: gate_up, scales of gate_up, down, scales of down.

        Raises UnsupportedFeatureError for biases.
        """
        if any(more.get(name) is not None for name in ("gate_up_bias", "down_bias")):
            raise refuse("quantised experts with biases", _UNQUANTISED)
        spec = self.spec
        router = (topk_weights, topk_ids, spec.top_k, spec.renormalize)
        by_block = (spec.block_size, spec.scale_fmt == "ue8m0")
        return ops.fused_moe_blocked_fp8(hidden_states, *weights, *router, *by_block)


class FusedMoEStaticF8(_EightBit, FusedMoEStaticF8Impl):
    def forward(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, *weights: Any, **unused: Any
    ) -> Tensor:
        """Return the experts' results.

        weights: gate_up, the scales of its rows, the scale of its input; then down, the scales of its rows, the scale
        of its input.
        """
        router = (topk_weights, topk_ids, self.spec.top_k, self.spec.renormalize)
        return ops.fused_moe_static_fp8(hidden_states, *weights, *router)
