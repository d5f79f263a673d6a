"""Read the rotary embedding of a checkpoint's configuration as transformers does.

A rope type that ``rotary.py`` lacks is refused while the configuration is read. LMDeploy ignores longrope's
``attention_factor`` and ``factor``, and computes yarn's from other defaults than transformers. A patch corrects both in
the parameters that LMDeploy passes to ``rotary.py``.
"""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.patching import Original, replaces

SERVED_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "su", "mrope")

# Rope types whose frequencies depend on the sequence's length.
_BY_LENGTH = ("dynamic", "longrope", "su")

WHOLE_HEADS = (
    *"deepseek_v2 deepseek_v3 deepseek_v32 gemma gemma2 gemma3_text glm_moe_dsa gpt_oss kimi_k2".split(),
    *"llama mistral mixtral phimoe qwen2 qwen2_moe qwen3 qwen3_moe".split(),
)
"""Model types that rotate whole heads with rope type "default". transformers ignores their partial_rotary_factor."""

_LAYER_TYPES = {"full_attention": ("default", "linear"), "sliding_attention": ("default",)}
"""Layer type -> the rope types that LMDeploy's Gemma 3 supports. Gemma 3 has rope parameters for each layer type."""


def parameters(config: Any) -> Mapping[str, Any]:
    """Return the rope parameters of a text model's configuration; empty if it has none."""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def rope_type(stored: Mapping[str, Any]) -> str:
    """Return the type in a set of rope parameters: ``rope_type``, in older checkpoints ``type``."""
    return stored.get("rope_type") or stored.get("type") or "default"


def original_length(config: Any) -> int | None:
    """Return the length above which frequencies depend on a sequence's length; None if they never do."""
    stored = parameters(config)
    if rope_type(stored) not in _BY_LENGTH:
        return None
    is_dynamic = rope_type(stored) == "dynamic"
    return config.max_position_embeddings if is_dynamic else _original(config, stored)


def _original(config: Any, stored: Mapping[str, Any]) -> int:
    """Return the original length as transformers does, from the configuration or else from the rope parameters.

    If neither has it, it is ``max_position_embeddings``.
    """
    own = getattr(config, "original_max_position_embeddings", None)
    return own or stored.get("original_max_position_embeddings") or config.max_position_embeddings


def check(config: Any) -> None:
    """Raise UnsupportedFeatureError for rope parameters that would give other tokens than transformers.

    config: the text model's configuration. Gemma 3's configuration has one set of parameters for each layer type.
    LMDeploy's Gemma 3 reads ``factor`` in the set of "full_attention". If that set has no factor, this function sets it
    to 1.
    """
    stored = parameters(config)
    nested = {name: stored[name] for name in _LAYER_TYPES if isinstance(stored.get(name), Mapping)}
    for own in nested.values() or [stored]:
        kind = rope_type(own)
        if kind not in SERVED_TYPES:
            raise refuse(f"rope type {kind!r}", "use another model")
        if "fope_sep_head" in own or "fope_num_inv_freq" in own:
            raise refuse("Fourier position embeddings (fope)", "use another model")
        part = own.get("partial_rotary_factor") or 1.0
        if part != 1 and kind != "default" and getattr(config, "model_type", "") in WHOLE_HEADS:
            what = f"partial_rotary_factor={part} with rope type {kind!r}, which transformers cannot run,"
            raise refuse(what, "use a model without it")
        if kind in _BY_LENGTH and "mrope_section" in own:
            raise refuse(f"rope type {kind!r} with mrope_section", "use another model")
    for name, own in nested.items():
        if getattr(config, "model_type", "") != "gemma3_text" or rope_type(own) not in _LAYER_TYPES[name]:
            raise refuse(f"rope type {rope_type(own)!r} only in {name} layers", "use another model")
    if nested:
        nested["full_attention"].setdefault("factor", 1.0)


def yarn_scale(spec: Any) -> float:
    """Return yarn's factor of cos and sin.

    It is the checkpoint's ``attention_factor``. If the checkpoint has none, but ``mscale`` and ``mscale_all_dim``, it
    is (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1). Otherwise it is 0.1 ln(factor) + 1. For a
    factor below 1, ln(factor) counts as 0.
    """
    params = spec.yarn_params
    if params.attention_factor is not None:
        return params.attention_factor

    def magnitude(weight: float) -> float:
        factor = spec.scaling_factor
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.mscale and params.mscale_all_dim:
        return magnitude(params.mscale) / magnitude(params.mscale_all_dim)
    return magnitude(1)


def longrope_scale(factor: float, original_length: int) -> float:
    """Return longrope's default factor of cos and sin: sqrt(1 + ln(factor) / ln(original length))."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))


@replaces(
    "lmdeploy.pytorch.nn.rotary_embedding:build_rotary_params",
    why="drops longrope's attention_factor and factor, and computes yarn's attention_factor from other defaults",
    when=activation.is_on,
)
def _build_rotary_params(original: Original, config: Any) -> dict[str, Any]:
    params, stored = original(config), parameters(config)
    if getattr(config, "model_type", "") in WHOLE_HEADS:
        params.pop("partial_rotary_factor", None)
    yarn, longrope = params.get("yarn_params"), params.get("longrope_params")
    if yarn is None and longrope is None:
        return params
    length = _original(config, stored)
    factor = stored.get("factor") or config.max_position_embeddings / length
    if yarn is not None:
        params |= {"scaling_factor": factor, "max_position_embeddings": length}
        yarn.attention_factor = stored.get("attention_factor")
        yarn.mscale, yarn.mscale_all_dim = stored.get("mscale"), stored.get("mscale_all_dim")
        yarn.attention_factor = yarn_scale(SimpleNamespace(**params))
    if longrope is not None:
        longrope.original_max_position_embeddings, scale = length, stored.get("attention_factor")
        scale = longrope_scale(factor, length) if scale is None else scale
        longrope.short_mscale = longrope.long_mscale = scale
    return params
