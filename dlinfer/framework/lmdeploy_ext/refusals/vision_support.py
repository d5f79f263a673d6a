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
}
"""Architecture -> the part of its configuration that is the language model's; empty where the whole is."""

REASONS = {
    "Glm4vForConditionalGeneration": "LMDeploy's class looks for fields of the language model where transformers 5 has "
    "none",
}
"""Architecture -> why it cannot be served, where there is more to say than that nobody has compared its tokens."""


def language_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of a served model's language part, where it is one of its own."""
    for name in config.get("architectures") or []:
        inside = config.get(SERVED.get(name) or "")
        if isinstance(inside, dict):
            return inside
    return None


def reason_against(names: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """Why a vision-language model is not served, possibly without words; None where it is.

    names: its classes. config: as ``config.json`` has it.
    """
    if not any(name in SERVED for name in names):
        return next((REASONS[name] for name in names if name in REASONS), "")
    if config.get("flash_mode"):
        return "it leaves out tokens of images that tell little (flash_mode)"
    return None
