"""Correct Qwen3-MoE and Qwen3-VL-MoE: layers without experts, and the layout of experts that transformers 5 saves."""

from typing import Any

from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


@corrects(
    "lmdeploy.pytorch.models.qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration._load_weight_fused_experts",
    why="reads experts as [experts, in, out], the released layout, but transformers 5 saves [experts, out, in]",
    for_models=("qwen3_vl_moe",),
)
def _either_layout(
    original: Original,
    self: Any,
    name: str,
    loaded_weight: Tensor,
    params_dict: dict[str, Any],
    fused_expert_params_mapping: list[Any],
) -> None:
    """Load one tensor of all experts. Its shape tells the layout, as in transformers; a square is [out, in]."""
    config = self.config.text_config
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    out_in = (2 * inner, hidden) if "gate_up" in name else (hidden, inner)
    if loaded_weight.shape[1:] == out_in:
        loaded_weight = loaded_weight.transpose(1, 2)
    original(self, name, loaded_weight, params_dict, fused_expert_params_mapping)


@corrects(
    "lmdeploy.pytorch.models.qwen3_moe:Qwen3MoeMLP.forward",
    why="lacks a parameter that every layer passes, so a model that has a layer without experts fails",
    signature="(self, x)",
    for_models=("qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe"),
)
def _without_routed_experts(original: Original, self: Any, x: Tensor, **passed: Any) -> Tensor:
    """Run the MLP of a layer without experts. passed: ``all_routed_experts``, where layers with experts note theirs."""
    return original(self, x)
