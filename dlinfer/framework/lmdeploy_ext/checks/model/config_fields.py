"""Refuses values of configuration fields that transformers' model class obeys, but LMDeploy's model class ignores."""

from collections.abc import Mapping
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import refuse

_Fields = Mapping[str, tuple[Any, ...]]
"""Field of a configuration -> the values that LMDeploy's class supports. A configuration may lack the field."""

_ACTIVATION: _Fields = {"hidden_act": ("swish", "silu")}
"""The activation in LMDeploy's classes, except for the model types in ``_OTHER_ACTIVATIONS``."""

_TANH_OR_NONE: _Fields = {"hidden_activation": (None, "gelu_pytorch_tanh")}
_OTHER_ACTIVATIONS: Mapping[str, _Fields] = {
    "gemma": {"hidden_act": ("gelu_pytorch_tanh",), **_TANH_OR_NONE},
    "gemma2": _TANH_OR_NONE,
    "gemma3_text": _TANH_OR_NONE,
    "gpt_oss": {},  # transformers' class reads no such field
}

_FIELDS: Mapping[str, _Fields] = {
    **{key: {"use_bidirectional_attention": (None, False)} for key in ("gemma", "gemma2", "gemma3_text")},
    **{key: {"rope_interleave": (None, True)} for key in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")},
    **{key: {"mlp_bias": (False,)} for key in ("deepseek_v2", "deepseek_v4")},
    "qwen2_moe": {"qkv_bias": (True,)},
}
"""model_type -> fields to check besides the activation."""

_OWN_HEAD_DIM = ("mixtral", "phimoe")
"""Model types whose LMDeploy class ignores head_dim: it divides hidden_size by the number of heads."""


def check(config: Any) -> None:
    """Raise UnsupportedFeatureError if a field has a value that LMDeploy's model class ignores.

    config: the text model's configuration.
    """
    kind = getattr(config, "model_type", "")
    fields = {**_OTHER_ACTIVATIONS.get(kind, _ACTIVATION), **_FIELDS.get(kind, {})}
    for name, served in fields.items():
        value = getattr(config, name, served[0])
        if value not in served:
            raise _refuse(kind, name, value, served[-1])
    if kind in _OWN_HEAD_DIM:
        share, value = config.hidden_size // config.num_attention_heads, getattr(config, "head_dim", None)
        if value not in (None, share):
            raise _refuse(kind, "head_dim", value, share)


def _refuse(kind: str, name: str, value: Any, served: Any) -> Exception:
    feature = f"{name}={value!r} of {kind}, which LMDeploy ignores,"
    return refuse(feature, f"use a model with {name}={served!r}")
