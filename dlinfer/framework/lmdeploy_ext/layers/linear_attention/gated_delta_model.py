"""Patches on LMDeploy's classes of gated linear attention (Qwen3-Next, Qwen3.5), for the layers in ``gated_delta.py``.

This file is imported before LMDeploy's modules, so it imports none of them at its top level.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.patching import Original, replaces

_QWEN3_5 = ("qwen3_5", "qwen3_5_moe", "intern_s2_preview")
_replaces = functools.partial(replaces, when=activation.is_on)
_replaces_next = functools.partial(_replaces, for_models=("qwen3_next",))
_replaces_3_5 = functools.partial(_replaces, for_models=_QWEN3_5)
_replaces_shared = functools.partial(_replaces, for_models=("qwen3_next", *_QWEN3_5))

_SECTIONS_3_5 = [11, 11, 10]  # transformers' default

# --- the model's configuration


def check(model_config: Any) -> None:
    """Set the states' dtypes in ``model_config``: float32 for the rule, the model's dtype for the convolution.

    LMDeploy takes bfloat16 for both states. With N draft tokens its slots hold N + 1 states of the rule and width + N
    inputs of the convolution. Here they hold N + 1 states of both.
    """
    if not getattr(model_config, "is_gated_delta", False) or not model_config.states_shapes:
        return
    convolution, rule = (shape for shape, _ in model_config.states_shapes)
    if len(rule) == 5:
        layers, channels, inputs = convolution
        convolution = (layers, rule[1], channels, inputs - rule[1] + 1)
    model_config.states_shapes = [(convolution, model_config.dtype), (rule, torch.float32)]


@_replaces_next(
    "lmdeploy.pytorch.configurations.qwen3_next:Qwen3NextModelConfigBuilder.build",
    why="counts layers by full_attention_interval, which transformers 5 replaces by layer_types",
)
def _build_config(
    original: Original, cls: Any, hf_config: Any, model_path: Any = None, tp: int = 1, **kwargs: Any
) -> Any:
    types = list(hf_config.layer_types)
    linear = _linear_layers("Qwen3-Next", types)
    if not hasattr(hf_config, "full_attention_interval"):
        hf_config.full_attention_interval = types.index("full_attention") + 1
    config = original(cls, hf_config, model_path, tp, **kwargs)
    config.num_layers = len(types) - linear
    config.states_shapes = [((linear, *shape[1:]), dtype) for shape, dtype in config.states_shapes]
    return config


def _linear_layers(model: str, types: list[str]) -> int:
    """Return how many of the layers are linear. Raises UnsupportedFeatureError if all or none are."""
    linear = types.count("linear_attention")
    if not linear or linear == len(types):
        advice = "use a model with full and linear attention layers"
        raise refuse(f"a {model} with only one type of layers", advice)
    return linear


@_replaces_3_5(
    "lmdeploy.pytorch.configurations.qwen3_5:Qwen3_5ModelConfigBuilder.build",
    why="misses fields of the configuration that transformers 5 takes for granted: the gate of attention, the axes of "
    "positions, and a dtype outside text_config. It builds a part for time series, but never loads its weights",
)
def _build_config_3_5(
    original: Original,
    cls: Any,
    hf_config: Any,
    model_path: str | None = None,
    tp: int = 1,
    is_draft_model: bool = False,
    spec_method: str | None = None,
    num_spec_tokens: int = 0,
    **kwargs: Any,
) -> Any:
    text = hf_config.text_config
    _linear_layers("Qwen3.5", list(text.layer_types))
    text.attn_output_gate = True
    text.rope_parameters = (
        {"mrope_section": _SECTIONS_3_5} | text.rope_parameters | {"mrope_interleaved": True}
    )
    if text.dtype is None:
        text.dtype = hf_config.dtype
    vars(hf_config).pop("ts_config", None)
    return original(cls, hf_config, model_path, tp, is_draft_model, spec_method, num_spec_tokens, **kwargs)


# --- parts that LMDeploy's models put together themselves


@_replaces_shared(
    "lmdeploy.pytorch.backends.gated_delta_rule:GatedDeltaMeta.__init__",
    why="computes indices for CUDA kernels at each step, but not what the device's ops need: the sequences' ends, "
    "their slots, which of them begin, and how many tokens they have",
)
def _meta_init(
    original: Original,
    self: Any,
    num_tokens: int,
    conv_kernel_size: int,
    state_ids: Tensor,
    attn_metadata: Any,
) -> None:
    self.is_decoding = attn_metadata.is_decoding
    self.state_ids = state_ids
    self.q_ends = attn_metadata.cu_seqlens_q_cpu[1:]
    self.fresh = attn_metadata.fresh
    self.past_lengths = attn_metadata.past_lengths


@_replaces_shared(
    "lmdeploy.pytorch.nn.gated_delta:build_rmsnorm_gated",
    why="takes the gated norm from flash-linear-attention, which needs Triton",
)
def _build_norm(original: Original, hidden_size: int, eps: float = 1e-06, **kwargs: Any) -> Any:
    from dlinfer.framework.lmdeploy_ext.layers.linear_attention.gated_delta import GatedRMSNorm

    return GatedRMSNorm(hidden_size, eps, **kwargs)


_CACHES = "caches its first result, which a graph cannot do, and would keep it after an update of the weights"


def _decay_rate(original: Original, self: Any) -> Tensor:
    return -self.A_log.float().exp()


PATCHES = (
    _replaces_next("lmdeploy.pytorch.models.qwen3_next:Qwen3NextGatedDeltaNet.get_A_log_exp", why=_CACHES)(
        _decay_rate
    ),
    _replaces_3_5("lmdeploy.pytorch.models.qwen3_5:Qwen3_5GatedDeltaNet.get_A_log_exp", why=_CACHES)(
        _decay_rate
    ),
)


@_replaces_next(
    "lmdeploy.pytorch.models.qwen3_next:Qwen3NextGatedDeltaNet.fix_query_key_value_ordering",
    why="reshapes with a size of -1, which a graph for any number of tokens cannot resolve",
)
def _split_projections(
    original: Original, self: Any, mixed_qkvz: Tensor, mixed_ba: Tensor
) -> tuple[Tensor, ...]:
    """Split the two joint projections, which are grouped by key heads, into four tensors.

    They are: q, k and v concatenated; z as [..., value heads, size]; b; and a.
    """
    size, group = self.head_k_dim, self.kv_ratio * self.head_v_dim
    heads = mixed_qkvz.unflatten(-1, (-1, 2 * size + 2 * group))
    parts = [part.flatten(-2) for part in heads.split((size, size, group, group), dim=-1)]
    b, a = mixed_ba.unflatten(-1, (-1, 2 * self.kv_ratio)).chunk(2, dim=-1)
    return torch.cat(parts[:3], dim=-1), parts[3].unflatten(-1, (-1, self.head_v_dim)), b, a
