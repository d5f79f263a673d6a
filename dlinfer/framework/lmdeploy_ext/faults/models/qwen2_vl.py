"""Correct Qwen2-VL, Qwen3-VL and Qwen3-Omni: an activation of vision layers, and fields that transformers assumes."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original

_AXES = {"mrope_section": [24, 20, 20]}  # transformers' default


@corrects(
    "lmdeploy.pytorch.models.qwen2_vl:VisionMlp.__init__",
    why="computes GELU even if the configuration names quick_gelu, x sigmoid(1.702 x), as Qwen2-VL's does",
    for_models=("qwen2_vl", "qwen2_5_vl"),
)
def _quick_gelu(original: Original, self: Any, config: Any, dtype: Any = None, device: Any = None) -> None:
    original(self, config, dtype, device)
    from transformers.activations import ACT2FN

    self.act = ACT2FN[config.hidden_act]


@corrects(
    "lmdeploy.pytorch.configurations.qwen3_vl:Qwen3VLModelConfigBuilder.build",
    why="misses a dtype outside text_config, where transformers 5 saves it, and fields that transformers' Qwen3-VL "
    "takes for granted: normalised weights of experts, interleaved axes of positions",
    for_models=("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
)
def _fields_of_transformers(
    original: Original, cls: Any, hf_config: Any, model_path: str | None = None, **kwargs: Any
) -> Any:
    inside = getattr(hf_config, "text_config", None)
    if inside is not None and inside.dtype is None:
        inside.dtype = hf_config.dtype
    if inside is not None and hf_config.model_type in ("qwen3_vl", "qwen3_vl_moe"):
        inside.norm_topk_prob = True
        _interleave_axes(inside)
    return original(cls, hf_config, model_path, **kwargs)


@corrects(
    "lmdeploy.pytorch.configurations.qwen3_omni:Qwen3OmniModelConfigBuilder.build",
    why="misses interleaved axes of positions, which transformers' Qwen3-Omni takes for granted",
    for_models=("qwen3_omni_moe",),
)
def _axes_of_transformers(
    original: Original, cls: Any, hf_config: Any, model_path: str | None = None, **kwargs: Any
) -> Any:
    _interleave_axes(hf_config.thinker_config.text_config)
    return original(cls, hf_config, model_path, **kwargs)


def _interleave_axes(text_config: Any) -> None:
    text_config.rope_parameters = _AXES | text_config.rope_parameters | {"mrope_interleaved": True}
