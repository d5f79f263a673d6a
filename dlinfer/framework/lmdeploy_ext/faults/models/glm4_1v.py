"""Correct GLM-4.1V: the place of its language model's fields in config.json, and a bias that no checkpoint has."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects, refuse
from dlinfer.framework.patching import Original

_LANGUAGE_FIELDS = (
    *"vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split(),
    *"head_dim rms_norm_eps max_position_embeddings pad_token_id".split(),
    "num_replicate_key_value_heads",  # LMDeploy's own field, for tensor parallelism
)
_SECTIONS = [8, 12, 12]  # transformers' default


@corrects(
    "lmdeploy.pytorch.configurations.glm4_1v:Glm4vModelConfigBuilder.build",
    why="leaves the language model's fields in text_config, as transformers 5 stores them, but the model reads them "
    "at the top level",
    for_models=("glm4v",),
)
def _language_at_the_top(
    original: Original, cls: Any, hf_config: Any, model_path: str | None = None, **kwargs: Any
) -> Any:
    inside = hf_config.text_config
    if not hasattr(inside, "eos_token_id"):
        inside.eos_token_id = getattr(hf_config, "eos_token_id", None)
    config = original(cls, hf_config, model_path, **kwargs)
    for name in _LANGUAGE_FIELDS:
        if hasattr(inside, name):
            setattr(hf_config, name, getattr(inside, name))
    rotated = inside.rope_parameters.get("partial_rotary_factor", 1.0)
    if rotated != 0.5:  # LMDeploy's layers always rotate half of a head
        raise refuse(f"GLM-4.1V with partial_rotary_factor={rotated}", "use a model with 0.5")
    hf_config.rope_parameters = {"mrope_section": _SECTIONS} | inside.rope_parameters
    hf_config.attention_bias = True  # q, k and v have biases whatever the configuration says
    return config


@corrects(
    "lmdeploy.pytorch.models.glm4_1v:Glm4vVisionAttention.__init__",
    why="adds a bias to attention's output that no checkpoint has, so its memory stays uninitialised",
    for_models=("glm4v",),
)
def _no_bias(original: Original, self: Any, config: Any, dtype: Any = None, device: Any = None) -> None:
    original(self, config, dtype, device)
    self.proj.bias = None
