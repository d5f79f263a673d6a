"""Which vision-language classes of LMDeploy's are served on our devices, and what of them is not.

Served means that greedy tokens with images equal those of transformers, in eager and in graph mode. A class that is not
named here is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SERVED = {
    "Qwen2VLForConditionalGeneration": "text_config",
    "Qwen2_5_VLForConditionalGeneration": "text_config",
    "InternVLForConditionalGeneration": "text_config",
    "InternVLChatModel": "llm_config",
    "Qwen3VLForConditionalGeneration": "text_config",
    "LlavaForConditionalGeneration": "text_config",
    "Glm4vForConditionalGeneration": "text_config",
    "CogVLMForCausalLM": "",
    "ChatGLMForConditionalGeneration": "",  # with a vision_config: GLM-4V
}
"""Architecture -> the part of its configuration that is the language model's; empty where the whole is."""


def language_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of a served model's language part, where it is one of its own."""
    for name in config.get("architectures") or []:
        inside = config.get(SERVED.get(name) or "")
        if isinstance(inside, dict):
            return inside
    return None


def reason_against(names: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """Why a vision-language model is not served, without words where nobody has compared its tokens; None where it is.

    names: its classes. config: as ``config.json`` has it.
    """
    if not any(name in SERVED for name in names):
        return ""
    if config.get("flash_mode"):
        return "it leaves out tokens of images that tell little (flash_mode)"
    if any(SERVED.get(name) == "" for name in names) and config.get("quantization_config"):
        return "quantised weights, with which nobody has compared its tokens"
    if "Glm4vForConditionalGeneration" in names and config.get("text_config") is None:
        return "its configuration has no text_config, outside of which transformers 5 reads no language model"
    return None
