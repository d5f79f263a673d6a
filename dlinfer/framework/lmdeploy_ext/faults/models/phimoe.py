"""Correct Phi-3.5-MoE: its class name in transformers 5, the input of its experts, and its tied output projection."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects, refuse
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_parameters
from dlinfer.framework.patching import Original

SAVED_AS = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
"""Class name in transformers 5 -> class name in LMDeploy and in older checkpoints."""


def check(config: Any) -> None:
    """Raise UnsupportedFeatureError for a PhiMoE with rope parameters that our rotary tables do not support.

    config: the model's transformers configuration.
    """
    parameters = rope_parameters.parameters(config)
    kind = rope_parameters.rope_type(parameters)
    if kind not in ("default", "longrope", "su"):
        raise refuse(f"PhiMoE with rope type {kind!r}", "use a model with rope type 'longrope'")
    if kind != "default" and not {"short_mscale", "long_mscale"} <= set(parameters):
        raise refuse(
            "PhiMoE with longrope but without short_mscale or long_mscale",
            "add both to rope_parameters in config.json",
        )


@corrects(
    "lmdeploy.pytorch.models.patch:_get_module_map",
    why="knows Phi-3.5-MoE by the class name in its remote code, but not by the name that transformers 5 saves",
    for_models=("phimoe",),
)
def _with_saved_names(original: Original) -> dict[str, str]:
    classes = original()
    return {saved: classes[name] for saved, name in SAVED_AS.items()} | classes


@corrects(
    "lmdeploy.pytorch.models.phi3_moe:PhiMoESparseMoeBlock.__init__",
    why="multiplies the experts' input by random numbers, as only training should",
    for_models=("phimoe",),
)
def _without_jitter(
    original: Original, self: Any, config: Any, dtype: Any = None, device: Any = None
) -> None:
    original(self, config, dtype, device)
    self.input_jitter_noise = 0.0


@corrects(
    "lmdeploy.pytorch.models.phi3_moe:PhiMoEForCausalLM.__init__",
    why="leaves the output projection uninitialised if the model ties its embeddings",
    for_models=("phimoe",),
)
def _tied(
    original: Original, self: Any, config: Any, ctx_mgr: Any, dtype: Any = None, device: Any = None
) -> None:
    original(self, config, ctx_mgr, dtype, device)
    if config.tie_word_embeddings:
        self.lm_head.weight = self.model.embed_tokens.weight
