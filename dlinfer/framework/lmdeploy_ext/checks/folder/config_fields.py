"""Fields of a configuration that transformers' class reads and LMDeploy's ignores: one value of each is served.

Without this check a model with another value would generate other tokens than transformers, in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import refuse

_SILU = ("swish", "silu")
_TANH = ("gelu_pytorch_tanh",)
_GEMMA = ("gemma", "gemma2", "gemma3_text")
_LATENT = ("deepseek_v3", "glm4_moe_lite")


@dataclass(frozen=True)
class Field:
    """One field. served: the values with which LMDeploy's class is right; a configuration without it is served too."""

    name: str
    served: tuple[Any, ...]


_ACTIVATION = Field("hidden_act", _SILU)
"""The activation of LMDeploy's classes, except those in ``_OTHER_ACTIVATIONS``."""

_OTHER_ACTIVATIONS = {
    "gemma": (Field("hidden_act", _TANH), Field("hidden_activation", (None, *_TANH))),
    "gemma2": (Field("hidden_activation", (None, *_TANH)),),
    "gemma3_text": (Field("hidden_activation", (None, *_TANH)),),
    "gpt_oss": (),  # transformers' class reads none
}

_FIELDS: Mapping[str, tuple[Field, ...]] = {
    **{name: (Field("use_bidirectional_attention", (None, False)),) for name in _GEMMA},
    **{name: (Field("rope_interleave", (None, True)),) for name in _LATENT},
    "deepseek_v2": (Field("mlp_bias", (False,)),),
    "qwen2_moe": (Field("qkv_bias", (True,)),),
}
"""model_type -> further fields."""

_OWN_HEAD_DIM = ("mixtral", "phimoe")
"""LMDeploy's classes that divide hidden_size by the number of heads, whatever head_dim says."""


def check(config: Any) -> None:
    """Raise UnsupportedFeatureError for a value that LMDeploy's class ignores. config: of the text model."""
    kind = getattr(config, "model_type", "")
    for field in (*_OTHER_ACTIVATIONS.get(kind, (_ACTIVATION,)), *_FIELDS.get(kind, ())):
        value = getattr(config, field.name, field.served[0])
        if value not in field.served:
            raise _refuse(kind, field.name, value, field.served[-1])
    if kind in _OWN_HEAD_DIM:
        share, value = config.hidden_size // config.num_attention_heads, getattr(config, "head_dim", None)
        if value not in (None, share):
            raise _refuse(kind, "head_dim", value, share)


def _refuse(kind: str, name: str, value: Any, served: Any) -> Exception:
    return refuse(
        f"{name}={value!r} of {kind}, which LMDeploy ignores,", f"use a model with {name}={served!r}"
    )
