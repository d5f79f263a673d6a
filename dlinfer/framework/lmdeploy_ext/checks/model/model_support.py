"""Which of LMDeploy's model classes are not served on our devices, told from ``config.json`` before anything loads.

Every other class of LMDeploy's module map is served. A class that a later release adds is let through, and what it
needs and the ops lack is refused layer by layer as it is built.
"""

from collections.abc import Iterator
from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.folder import quantisation
from dlinfer.framework.lmdeploy_ext.checks.model import vision_support
from dlinfer.framework.lmdeploy_ext.checks.model.speculation import PAIRS
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import language_configs
from dlinfer.framework.lmdeploy_ext.device.activation import refuse

_DRAFT = "it drafts for speculative decoding, and is no model of its own"
_DIFFUSION = "it decodes by block diffusion"
_QWEN3_5 = "it is Qwen3.5's vision-language model with experts of its own, and Qwen3.5 is not served"
_COMPRESSED = "it attends to compressed caches"

_DRAFTS = {draft for _, draft in PAIRS.values()}

NOT_SERVED = {
    "MetaMoeForConditionalGeneration": _QWEN3_5,
    "DeepseekV4ForCausalLM": _COMPRESSED,
    "SDARForCausalLM": _DIFFUSION,
    "SDARMoeForCausalLM": _DIFFUSION,
    "EagleLlamaForCausalLM": _DRAFT,
    "Eagle3LlamaForCausalLM": _DRAFT,
    "Eagle3DeepseekV2ForCausalLM": _DRAFT,
    "DeepseekMTPModel": _DRAFT,
    "DeepseekV32MTPModel": _DRAFT,
    "Glm4MoeMTPModel": _DRAFT,
    "GlmMoeDsaMTPModel": _DRAFT,
    "HYV3MTP": _DRAFT,
    "Qwen3_5MTPModel": _DRAFT,
    "DFlashDraftModel": _DRAFT,
}
"""Architecture -> why it is not served. Vision-language models are told by ``is_vision_language``."""


def architectures(config: dict[str, Any]) -> list[str]:
    """The classes that a configuration names: by ``auto_map``, which LMDeploy looks at first, and ``architectures``."""
    mapped = (config.get("auto_map") or {}).get("AutoModelForCausalLM")
    return ([mapped.rpartition(".")[2]] if mapped else []) + list(config.get("architectures") or [])


def check_support(config: dict[str, Any], is_draft: bool = False) -> None:
    """Raise UnsupportedFeatureError for a configuration, as ``config.json`` has it, whose model is not served."""
    names = architectures(config)
    shown = f" ({', '.join(names)})" if names else ""
    if is_vision_language(config):
        reason = vision_support.reason_against(names, config)
        if reason is not None:
            feature = f"a vision-language model{shown}" + (f": {reason}" if reason else "")
            raise refuse(
                feature, "use the language model of the same family, or a served vision-language model"
            )
        inside = vision_support.language_config(config)
        names = [] if inside is None else architectures(inside)
    for name in names:
        if is_draft and name in _DRAFTS:
            continue
        if name in NOT_SERVED:
            raise refuse(f"{name} ({NOT_SERVED[name]})", "use another model")
    for part, found in quantisation_of(config):
        quantisation.check(names, found, part, is_inside=part is not config)


def is_vision_language(config: dict[str, Any]) -> bool:
    """Whether LMDeploy would take the model for one of images: by its list of classes, or by a part for vision."""
    from lmdeploy.archs import check_vl_llm

    if config.get("vision_config"):
        return True
    return any(check_vl_llm("pytorch", config | {"architectures": [name]}) for name in architectures(config))


def quantisation_of(config: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """(configuration, how it is quantised) of a configuration, and of the one of its language model inside it."""
    for part in language_configs(config):
        found = part.get("quantization_config") if isinstance(part, dict) else None
        if found:
            yield part, found
