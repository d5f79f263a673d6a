"""What LMDeploy's classes of Phi-3.5-MoE and of MiniCPM3 make themselves, put right for our devices.

Both read their rope parameters themselves, as transformers 4 had them. This file loads before LMDeploy's modules do,
since it patches them.
"""

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.device.activation import corrects, refuse
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_parameters
from dlinfer.framework.patching import Original, Patch

# --- the model's configuration


def check(config: Any) -> None:
    """Raise UnsupportedFeatureError for a configuration that these classes compute otherwise than transformers.

    config: of the text model.
    """
    of_class = {"phimoe": _check_phimoe, "minicpm3": _check_minicpm3}.get(getattr(config, "model_type", ""))
    if of_class is not None:
        of_class(config)


def _check_phimoe(config: Any) -> None:
    given = rope_parameters.parameters(config)
    kind = rope_parameters.rope_type(given)
    if kind not in ("default", "longrope", "su"):
        raise refuse(f"PhiMoE with rope type {kind!r}", "use a model with longrope")
    if kind != "default" and not {"short_mscale", "long_mscale"} <= set(given):
        raise refuse("PhiMoE with longrope and no short_mscale or long_mscale", "add both to rope_parameters")


def _check_minicpm3(config: Any) -> None:
    share = config.hidden_size // config.num_attention_heads
    values = getattr(config, "v_head_dim", None) or share
    found = {
        f"v_head_dim={values} in place of {share}": values != share,
        "q_lora_rank=None": config.q_lora_rank is None,
        "mlp_bias": getattr(config, "mlp_bias", False),
        "attention scaled by mscale_all_dim": rope_parameters.parameters(config).get("mscale_all_dim"),
    }
    for feature, is_there in found.items():
        if is_there:
            raise refuse(f"MiniCPM3 with {feature}", "use a model with the layers of MiniCPM3-4B")


# --- names

SAVED_AS = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
"""A class of transformers 5's -> LMDeploy's name of the same model, which checkpoints of before have."""


@corrects(
    "lmdeploy.pytorch.models.patch:_get_module_map",
    why="knows Phi-3.5-MoE by the name of its remote code, and not by the one that transformers 5 saves",
    for_models=("phimoe",),
)
def _with_saved_names(original: Original) -> dict[str, str]:
    classes = original()
    return {saved: classes[name] for saved, name in SAVED_AS.items()} | classes


# --- rotary tables


class _Unscaled:
    """A configuration whose rope parameters cannot be seen, for a class that must not read them."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name in ("rope_parameters", "rope_scaling"):
            raise AttributeError(name)
        return getattr(self._config, name)


def _tables(config: Any, dim: int) -> nn.Module:
    """Tables of cos and sin for the first ``dim`` features of a head, as LMDeploy builds those of other classes."""
    from lmdeploy.pytorch.nn import rotary_embedding

    params: dict[str, Any] = rotary_embedding.build_rotary_params(config)
    longrope = params.get("longrope_params")
    if longrope is not None and config.model_type == "phimoe":
        given = rope_parameters.parameters(config)
        longrope.short_mscale, longrope.long_mscale = given["short_mscale"], given["long_mscale"]
    base = rotary_embedding.get_rope_theta(config)
    return rotary_embedding.build_rotary_embedding(dim, config.max_position_embeddings, base, **params)


def _rotary(target: str, model: str, rotated: Callable[[Any], int]) -> Patch:
    """For a class's model. rotated: how many features of a head are rotated, from a configuration."""

    @corrects(
        target,
        why="looks for rope_parameters['type'], which transformers 5 does not write, and serves longrope alone",
        for_models=(model,),
    )
    def init(original: Original, self: Any, config: Any, dtype: Any = None, device: Any = None) -> None:
        original(self, _Unscaled(config), dtype, device)
        self.rotary_emb = _tables(config, rotated(config))

    return init


PATCHES = (
    _rotary(
        "lmdeploy.pytorch.models.phi3_moe:PhiMoEModel.__init__",
        "phimoe",
        lambda config: config.hidden_size // config.num_attention_heads,
    ),
    _rotary(
        "lmdeploy.pytorch.models.minicpm3:MiniCPM3Model.__init__",
        "minicpm3",
        lambda config: config.qk_rope_head_dim,
    ),
)


# --- Phi-3.5-MoE's layers


@corrects(
    "lmdeploy.pytorch.models.phi3_moe:PhiMoESparseMoeBlock.__init__",
    why="multiplies the experts' input by random numbers, which is meant for training",
    for_models=("phimoe",),
)
def _without_jitter(
    original: Original, self: Any, config: Any, dtype: Any = None, device: Any = None
) -> None:
    original(self, config, dtype, device)
    self.input_jitter_noise = 0.0


@corrects(
    "lmdeploy.pytorch.models.phi3_moe:PhiMoEForCausalLM.__init__",
    why="leaves the head of a model with tied embeddings uninitialised",
    for_models=("phimoe",),
)
def _tied(
    original: Original, self: Any, config: Any, ctx_mgr: Any, dtype: Any = None, device: Any = None
) -> None:
    original(self, config, ctx_mgr, dtype, device)
    if config.tie_word_embeddings:
        self.lm_head.weight = self.model.embed_tokens.weight


# --- MiniCPM3's layers


@corrects(
    "lmdeploy.pytorch.models.minicpm3:MiniCPMAttention.__init__",
    why="tells attention that a head has as many elements as the latent and the rotated part together",
    for_models=("minicpm3",),
)
def _head_sizes(original: Original, self: Any, config: Any, dtype: Any = None, device: Any = None) -> None:
    original(self, config, dtype, device)
    self.attn_fwd.impl.head_size = self.attn_fwd.impl.v_head_size = self.q_head_dim


def _logits(self: Any, hidden_states: Tensor) -> Tensor:
    """hidden_states [1, rows, hidden] -> logits [1, rows, vocabulary], as MiniCPM3 scales them."""
    return self.lm_head(hidden_states / (self.config.hidden_size / self.config.dim_model_base))


@corrects(
    "lmdeploy.pytorch.models.minicpm3:MiniCPM3ForCausalLM.__init__",
    why="has no get_logits, by which LMDeploy asks for those of the tokens that it needs",
    for_models=("minicpm3",),
)
def _with_logits(
    original: Original, self: Any, config: Any, ctx_mgr: Any, dtype: Any = None, device: Any = None
) -> None:
    original(self, config, ctx_mgr, dtype, device)
    self.get_logits = types.MethodType(_logits, self)


@corrects(
    "lmdeploy.pytorch.models.minicpm3:MiniCPM3ForCausalLM.forward",
    why="computes the logits of all tokens of a prompt, where one is wanted",
    for_models=("minicpm3",),
)
def _hidden_states(
    original: Original,
    self: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    past_key_values: list[list[Tensor]],
    attn_metadata: Any = None,
    inputs_embeds: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Hidden states [1, N, hidden] of the N tokens input_ids [1, N], for ``get_logits``."""
    step = (input_ids, position_ids, past_key_values, attn_metadata, inputs_embeds)
    return self.model(*step)
