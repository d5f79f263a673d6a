"""Refuses LMDeploy's model classes that our devices do not serve. Reads ``config.json`` before anything loads.

Language models: every class in LMDeploy's module map is served unless ``NOT_SERVED`` lists it. If a later release of
LMDeploy adds a class, this check accepts it. Building the model then fails if our ops cannot compute one of its layers.

Vision-language models: only the classes in ``SERVED_VISION`` are served. For these classes, greedy tokens with images
are the same as in transformers, in eager and in graph mode.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.model import quantisation
from dlinfer.framework.lmdeploy_ext.checks.model.speculation import PAIRS
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import AS_STORED, language_configs
from dlinfer.framework.lmdeploy_ext.device.activation import refuse

NOT_SERVED = {
    "MetaMoeForConditionalGeneration": "its experts lie in several blocks, and transformers has no such class",
    **dict.fromkeys(
        "EagleLlamaForCausalLM Eagle3LlamaForCausalLM Eagle3DeepseekV2ForCausalLM DeepseekMTPModel "
        "DeepseekV32MTPModel Glm4MoeMTPModel GlmMoeDsaMTPModel HYV3MTP Qwen3_5MTPModel DFlashDraftModel".split(),
        "it only drafts tokens for speculative decoding",
    ),
}
"""Architecture -> why it is not served. For vision-language models see ``NOT_SERVED_VISION``."""

_NO_ORACLE = "transformers has no such class to compare its tokens with"
_OWN_CODE = f"{_NO_ORACLE}, and its image processor is code in the checkpoint"
NOT_SERVED_VISION = {
    "DeepseekVLV2ForCausalLM": "LMDeploy reads its images by a package that needs transformers below 4.48",
    "InternS1ProForConditionalGeneration": f"{_NO_ORACLE}, nor its frequencies of positions (FoPE)",
    "InternS1_1_ForConditionalGeneration": f"{_NO_ORACLE}, nor its frequencies of positions (FoPE)",
    "InternS2MobiusForCausalLM": f"its experts lie in several blocks, and {_NO_ORACLE}",
    "InternS2MobiusForConditionalGeneration": f"its experts lie in several blocks, and {_NO_ORACLE}",
    "Kimi_K25ForConditionalGeneration": "transformers 5 saved it, and LMDeploy reads only the published checkpoint, "
    "which has other fields and names of weights",
    "MiniCPMV": _OWN_CODE,
    "Phi3VForCausalLM": _OWN_CODE,
}
"""Vision-language architecture -> why it is not served."""


SERVED_VISION = {
    "Qwen2VLForConditionalGeneration": "text_config",
    "Qwen2_5_VLForConditionalGeneration": "text_config",
    "InternVLForConditionalGeneration": "text_config",
    "InternVLChatModel": "llm_config",
    "InternS1ForConditionalGeneration": "text_config",
    "InternS2PreviewForConditionalGeneration": "text_config",
    "InternS2PreviewForCausalLM": "text_config",
    "Qwen3VLForConditionalGeneration": "text_config",
    "Qwen3VLMoeForConditionalGeneration": "text_config",
    "Qwen3OmniMoeForConditionalGeneration": "thinker_config.text_config",
    "Qwen3_5ForConditionalGeneration": "text_config",
    "Qwen3_5MoeForConditionalGeneration": "text_config",
    "Gemma3ForConditionalGeneration": "text_config",
    "Llama4ForConditionalGeneration": "text_config",
    "LlavaForConditionalGeneration": "text_config",
    "LlavaNextForConditionalGeneration": "text_config",
    "Glm4vForConditionalGeneration": "text_config",
    "KimiK25ForConditionalGeneration": "text_config",
    "CogVLMForCausalLM": "",
    "ChatGLMForConditionalGeneration": "",  # with a vision_config: GLM-4V
}
"""Served vision-language architecture -> the keys of its language model's configuration; empty if not nested."""

_COMPARED_PACKED = {
    "Qwen3_5ForConditionalGeneration": ("awq",),
    "Qwen3_5MoeForConditionalGeneration": ("awq",),
    "Qwen3VLMoeForConditionalGeneration": (),
    "Gemma3ForConditionalGeneration": (),
    "Llama4ForConditionalGeneration": (),
    "LlavaNextForConditionalGeneration": (),
    AS_STORED: ("compressed-tensors",),
    "Qwen3OmniMoeForConditionalGeneration": (),
    "InternS1ForConditionalGeneration": (),
    "InternS2PreviewForConditionalGeneration": (),
    "InternS2PreviewForCausalLM": (),
}
"""Vision-language architecture -> the quantisation methods that are served, because a test compares the tokens."""


def architectures(config: dict[str, Any]) -> list[str]:
    """Return a configuration's class names: first the name in ``auto_map``, if any, then those in ``architectures``.

    LMDeploy prefers the name in ``auto_map``.
    """
    mapped = (config.get("auto_map") or {}).get("AutoModelForCausalLM")
    return ([mapped.rpartition(".")[2]] if mapped else []) + list(config.get("architectures") or [])


def check_support(config: dict[str, Any], is_draft: bool = False) -> None:
    """Raise UnsupportedFeatureError for a model that is not served.

    config: the contents of ``config.json``. is_draft: whether the model drafts tokens for speculative decoding.
    """
    names = architectures(config)
    shown = f" ({', '.join(names)})" if names else ""
    inside = None
    drafts = {draft for _, draft in PAIRS.values()} if is_draft else set()
    if is_vision_language(config) and not drafts & set(names):
        if (reason := reason_against(names, config)) is not None:
            feature = f"a vision-language model{shown}" + (f": {reason}" if reason else "")
            advice = "use the language model of the same family, or a supported vision-language model"
            raise refuse(feature, advice)
        inside = language_config(config)
        names = [] if inside is None else architectures(inside)
    for name in names:
        if name in NOT_SERVED and name not in drafts:
            raise refuse(f"{name} ({NOT_SERVED[name]})", "use another model")
    for part, quantisation_config in quantisation_of(config):
        if AS_STORED in architectures(config):
            quantisation.check_stored_experts(quantisation_config, inside or config)
            continue
        is_inside = part is not config
        model = part if is_inside or inside is None else {**inside, **config}  # the sizes are inside
        quantisation.check(names, quantisation_config, model, is_inside)


def is_vision_language(config: dict[str, Any]) -> bool:
    """Return whether LMDeploy would load a vision-language model.

    That is the case if the configuration has a ``vision_config``, or if LMDeploy lists its class as vision-language.
    """
    from lmdeploy.archs import check_vl_llm

    if config.get("vision_config"):
        return True
    return any(check_vl_llm("pytorch", config | {"architectures": [name]}) for name in architectures(config))


def quantisation_of(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield (configuration, its ``quantization_config``) for each quantised part of a model.

    The parts are the model itself and the language models nested in its configuration.
    """
    for part in language_configs(config):
        quantisation_config = part.get("quantization_config") if isinstance(part, dict) else None
        if quantisation_config:
            yield part, quantisation_config


def language_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the nested configuration of a vision-language model's language model.

    The result is None if no architecture is in ``SERVED_VISION``, or if the configuration is not nested.
    """
    for name in config.get("architectures") or []:
        keys = SERVED_VISION.get(name)
        inside: Any = config if keys else None
        for key in (keys or "").split("."):
            inside = inside.get(key) if isinstance(inside, Mapping) else None
        if isinstance(inside, dict):
            return inside
    return None


def reason_against(names: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """Return a reason not to serve a vision-language model; None if it is served.

    The reason is an empty text for a class that LMDeploy does not have. names: the model's class names. config: the
    contents of config.json.
    """
    if not any(name in SERVED_VISION for name in names):
        return next((NOT_SERVED_VISION[name] for name in names if name in NOT_SERVED_VISION), "")
    if config.get("flash_mode"):
        return "it drops image tokens that carry little information (flash_mode)"
    if any(SERVED_VISION.get(name) == "" for name in names) and config.get("quantization_config"):
        return "its tokens with quantised weights were never compared"
    methods = {str(stored.get("quant_method", "unknown")) for _, stored in quantisation_of(dict(config))}
    for name in names:
        if methods - set(_COMPARED_PACKED.get(name, methods)):
            return f"its tokens with weights quantised as {', '.join(sorted(methods))} were never compared"
    if "Glm4vForConditionalGeneration" in names and config.get("text_config") is None:
        return "its config.json has no text_config, where transformers 5 reads the language model"
    return None
