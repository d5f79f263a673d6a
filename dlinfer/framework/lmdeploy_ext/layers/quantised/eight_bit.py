"""Layers of 8-bit weights and activations for LMDeploy: W8A8 (smooth_quant), blocked FP8 and static FP8.

LMDeploy's own dlinfer implementations of W8A8 round the experts' scales to bfloat16, take int8 alone for them and may
transpose weights; of FP8 it has none. Weights stay as they were loaded.
"""

from collections.abc import Callable
from typing import Any

import torch
from lmdeploy.pytorch.backends.blockedf8_modules import LinearBlockedF8Impl
from lmdeploy.pytorch.backends.moe import FusedMoEBlockedF8Impl, FusedMoEStaticF8Impl, FusedMoEW8A8Impl
from lmdeploy.pytorch.backends.qmodules import LinearW8A8Impl, RMSNormW8A8Impl
from lmdeploy.pytorch.backends.static_fp8_modules import LinearStaticF8Impl
from lmdeploy.pytorch.models.q_modules import QTensor
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device.activation import refuse

_UNQUANTISED = "use the unquantised model in bfloat16 or float32"


def _check_dtype(dtype: torch.dtype, *served: torch.dtype) -> torch.dtype:
    if dtype not in served:
        raise refuse(f"weights quantised to {dtype}", _UNQUANTISED)
    return dtype


class RMSNormW8A8(RMSNormW8A8Impl):
    """A norm whose result is quantised at once, for the linear layers behind it."""

    def __init__(self, eps: float, quant_dtype: torch.dtype) -> None:
        self.eps, self.quant_dtype = eps, quant_dtype

    @classmethod
    def from_spec(cls, spec: Any) -> "RMSNormW8A8":
        """From LMDeploy's RMSNormW8A8BuildSpec. Raises UnsupportedFeatureError for a dtype that no op serves."""
        return cls(spec.eps, _check_dtype(spec.quant_dtype, torch.int8, torch.float8_e4m3fn))

    def forward(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
        """x [..., hidden] -> QTensor, and with a residual the new residual."""
        if residual is None:
            return QTensor(*ops.rms_norm_w8a8(x, weight, self.eps, self.quant_dtype))
        numbers, scale, total = ops.add_rms_norm_w8a8(x, residual, weight, self.eps, self.quant_dtype)
        return QTensor(numbers, scale), total


class LinearW8A8(LinearW8A8Impl):
    """A linear layer of 8-bit weights with a scale for each row; what is not quantised yet becomes so, by token."""

    def __init__(self, out_dtype: torch.dtype, quant_dtype: torch.dtype) -> None:
        self.out_dtype, self.quant_dtype = out_dtype, quant_dtype

    @classmethod
    def from_spec(cls, spec: Any) -> "LinearW8A8":
        """From LMDeploy's LinearW8A8BuildSpec. Raises UnsupportedFeatureError for a dtype that no op serves."""
        return cls(spec.output_dtype, _check_dtype(spec.quant_dtype, torch.int8, torch.float8_e4m3fn))

    def forward(
        self,
        x: Any,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
    ) -> Tensor:
        """x: QTensor or float tensor [..., in]; weight [out, in], scale [out, 1] -> [..., out] of the model's dtype."""
        assert not all_reduce, "tensor parallelism is refused"
        if isinstance(x, QTensor):
            numbers, by = x.tensor, x.scale
        else:
            numbers, by = ops.dynamic_quant(x, self.quant_dtype, "PER_TOKEN")
        return ops.linear_w8a8(numbers, weight, by, scale, self.out_dtype, self.quant_dtype, bias)

    def forward_static(
        self,
        x: Tensor,
        weight: Tensor,
        input_scale: Tensor,
        input_offset: Tensor,
        deq_scale: Tensor,
        quant_bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
    ) -> Tensor:
        """The same by fixed scales, as ModelSlim's checkpoints have them."""
        assert not all_reduce, "tensor parallelism is refused"
        return ops.linear_w8a8_static(
            x, weight, input_scale, input_offset, deq_scale, self.out_dtype, self.quant_dtype, quant_bias
        )


class LinearBlockedF8(LinearBlockedF8Impl):
    """A linear layer of float8 weights with a scale for each block."""

    def __init__(self, block_size: int, scale_fmt: str | None) -> None:
        super().__init__()
        self.block_size = block_size
        self.set_scale_fmt(scale_fmt)

    @classmethod
    def from_spec(cls, spec: Any) -> "LinearBlockedF8":
        """From LMDeploy's LinearBlockedF8BuildSpec. Raises UnsupportedFeatureError for a dtype that no op serves."""
        _check_dtype(spec.fp8_dtype, torch.float8_e4m3fn)
        return cls(spec.block_size, spec.scale_fmt)

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
        rank: int = 0,
        scatter_size: list[int] | None = None,
    ) -> Tensor:
        """x [..., in], weight [out, in], scale [out / block, in / block] -> [..., out]."""
        assert not all_reduce, "tensor parallelism is refused"
        return ops.linear_blocked_fp8(x, weight, scale, bias, self.block_size, self.scale_fmt == "ue8m0")


class LinearStaticF8(LinearStaticF8Impl):
    """A linear layer of float8 weights with a scale for each row, and one fixed scale for its input."""

    @classmethod
    def from_spec(cls, spec: Any) -> "LinearStaticF8":
        """From LMDeploy's LinearStaticF8BuildSpec. Raises UnsupportedFeatureError for a dtype that no op serves."""
        _check_dtype(spec.fp8_dtype, torch.float8_e4m3fn)
        return cls()

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        input_scale: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
        rank: int = 0,
        scatter_size: list[int] | None = None,
    ) -> Tensor:
        """x [..., in], weight [out, in], input_scale [1], weight_scale [out] -> [..., out]."""
        assert not all_reduce, "tensor parallelism is refused"
        return ops.linear_static_fp8(x, weight, weight_scale, input_scale, bias)


def _check_experts(spec: Any) -> None:
    if getattr(spec, "ep_size", 1) > 1:
        raise refuse(f"expert parallelism (ep_size={spec.ep_size})", "set ep=1")
    if getattr(spec, "custom_gateup_act", False):
        raise refuse("quantised experts with an activation of their own", _UNQUANTISED)


class FusedMoEW8A8(FusedMoEW8A8Impl):
    """Experts of 8-bit weights with a scale for each row."""

    def __init__(self, top_k: int, renormalize: bool) -> None:
        self.top_k, self.renormalize = top_k, renormalize

    @classmethod
    def from_spec(cls, spec: Any) -> "FusedMoEW8A8":
        """From LMDeploy's FusedMoEW8A8BuildSpec. Raises UnsupportedFeatureError for what no op serves."""
        _check_experts(spec)
        _check_dtype(spec.quant_dtype, torch.int8, torch.float8_e4m3fn)
        return cls(spec.top_k, spec.renormalize)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - LMDeploy calls it thus, unlike its declaration
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        gate_up_weights: Tensor,
        gate_up_scale: Tensor,
        down_weights: Tensor,
        down_scale: Tensor,
        expert_list: list[int] | None = None,
    ) -> Tensor:
        """hidden_states [tokens, hidden] -> the same shape."""
        return ops.fused_moe_w8a8(
            hidden_states,
            gate_up_weights,
            gate_up_scale,
            down_weights,
            down_scale,
            topk_weights,
            topk_ids,
            self.top_k,
            self.renormalize,
        )


class FusedMoEBlockedF8(FusedMoEBlockedF8Impl):
    """Experts of float8 weights with a scale for each block."""

    def __init__(self, top_k: int, renormalize: bool, block_size: int, scale_fmt: str | None) -> None:
        super().__init__()
        self.top_k, self.renormalize, self.block_size = top_k, renormalize, block_size
        self.set_scale_fmt(scale_fmt)

    @classmethod
    def from_spec(cls, spec: Any) -> "FusedMoEBlockedF8":
        """From LMDeploy's FusedMoEBlockedF8BuildSpec. Raises UnsupportedFeatureError for what no op serves."""
        _check_experts(spec)
        _check_dtype(spec.fp8_dtype, torch.float8_e4m3fn)
        return cls(spec.top_k, spec.renormalize, spec.block_size, spec.scale_fmt)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - as above
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        gate_up_weights: Tensor,
        gate_up_scale: Tensor,
        down_weights: Tensor,
        down_scale: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        expert_list: list[int] | None = None,
        act_func: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """hidden_states [tokens, hidden] -> the same shape."""
        if gate_up_bias is not None or down_bias is not None:
            raise refuse("quantised experts with biases", _UNQUANTISED)
        return ops.fused_moe_blocked_fp8(
            hidden_states,
            gate_up_weights,
            gate_up_scale,
            down_weights,
            down_scale,
            topk_weights,
            topk_ids,
            self.top_k,
            self.renormalize,
            self.block_size,
            self.scale_fmt == "ue8m0",
        )


class FusedMoEStaticF8(FusedMoEStaticF8Impl):
    """Experts of float8 weights with fixed scales for their inputs."""

    def __init__(self, top_k: int, renormalize: bool) -> None:
        self.top_k, self.renormalize = top_k, renormalize

    @classmethod
    def from_spec(cls, spec: Any) -> "FusedMoEStaticF8":
        """From LMDeploy's FusedMoEStaticF8BuildSpec. Raises UnsupportedFeatureError for a dtype that no op serves."""
        _check_dtype(spec.quant_dtype, torch.float8_e4m3fn)
        return cls(spec.top_k, spec.renormalize)

    def forward(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        gate_up_weights: Tensor,
        gate_up_weight_scale: Tensor,
        gate_up_input_scale: Tensor,
        down_weights: Tensor,
        down_weight_scale: Tensor,
        down_input_scale: Tensor,
        expert_list: list[int] | None = None,
    ) -> Tensor:
        """hidden_states [tokens, hidden] -> the same shape."""
        return ops.fused_moe_static_fp8(
            hidden_states,
            gate_up_weights,
            gate_up_weight_scale,
            gate_up_input_scale,
            down_weights,
            down_weight_scale,
            down_input_scale,
            topk_weights,
            topk_ids,
            self.top_k,
            self.renormalize,
        )
