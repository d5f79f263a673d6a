"""Correct MiniCPM3: the sizes of its attention heads, and logits for the needed tokens only."""

import types
from typing import Any

from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import corrects, refuse
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_parameters
from dlinfer.framework.patching import Original

_MODULE = "lmdeploy.pytorch.models.minicpm3"


def check(config: Any) -> None:
    """Raise UnsupportedFeatureError for a MiniCPM3 that LMDeploy's class computes differently from transformers.

    config: the model's transformers configuration.
    """
    share = config.hidden_size // config.num_attention_heads
    size = getattr(config, "v_head_dim", None) or share
    unserved = {
        f"v_head_dim={size} instead of {share}": size != share,
        "q_lora_rank=None": config.q_lora_rank is None,
        "mlp_bias": getattr(config, "mlp_bias", False),
        "attention scaled by mscale_all_dim": rope_parameters.parameters(config).get("mscale_all_dim"),
    }
    for feature, is_there in unserved.items():
        if is_there:
            raise refuse(f"MiniCPM3 with {feature}", "use a model with the same layers as MiniCPM3-4B")


@corrects(
    f"{_MODULE}:MiniCPMAttention.__init__",
    why="gives attention the size of latent plus rotated part as head size, though a head is smaller",
    for_models=("minicpm3",),
)
def _head_sizes(original: Original, self: Any, config: Any, dtype: Any = None, device: Any = None) -> None:
    original(self, config, dtype, device)
    self.attn_fwd.impl.head_size = self.attn_fwd.impl.v_head_size = self.q_head_dim


def _logits(self: Any, hidden_states: Tensor) -> Tensor:
    """Return logits [1, rows, vocabulary] of hidden_states [1, rows, hidden], scaled as MiniCPM3 scales them."""
    return self.lm_head(hidden_states / (self.config.hidden_size / self.config.dim_model_base))


@corrects(
    f"{_MODULE}:MiniCPM3ForCausalLM.__init__",
    why="creates a model without get_logits, which LMDeploy calls for the logits of the tokens that it needs",
    for_models=("minicpm3",),
)
def _with_logits(
    original: Original, self: Any, config: Any, ctx_mgr: Any, dtype: Any = None, device: Any = None
) -> None:
    original(self, config, ctx_mgr, dtype, device)
    self.get_logits = types.MethodType(_logits, self)


@corrects(
    f"{_MODULE}:MiniCPM3ForCausalLM.forward",
    why="computes the logits of all tokens of a prompt, though only one row is needed",
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
    """Return the hidden states [1, N, hidden] of the N tokens input_ids [1, N].

    LMDeploy then calls ``get_logits`` with the rows whose logits it needs, and with no other rows.
    """
    return self.model(input_ids, position_ids, past_key_values, attn_metadata, inputs_embeds)
