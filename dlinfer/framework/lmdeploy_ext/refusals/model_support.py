"""Which of LMDeploy's model classes are not served on our devices, told from ``config.json`` before anything loads.

Every other class of LMDeploy's module map is served. A class that a later release adds is let through, and what it
needs and the ops lack is refused layer by layer as it is built.
"""

from collections.abc import Iterator
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.refusing import refuse

_DRAFT = "it drafts for speculative decoding, and is no model of its own"
_DIFFUSION = "it decodes by block diffusion"
_LINEAR_ATTENTION = "it has layers of gated linear attention"
_SPARSE = "it has DeepSeek's sparse attention"
_ROPE = "LMDeploy's class cannot read the rope parameters of transformers 5"

NOT_SERVED = {
    "GptOssForCausalLM": "its experts have biases and an activation of their own, and LMDeploy's loader needs CUDA",
    "Glm4MoeForCausalLM": "LMDeploy's class routes tokens by a softmax, where the model has sigmoids and a correction "
    "bias",
    "PhiMoEForCausalLM": _ROPE,
    "MiniCPM3ForCausalLM": _ROPE,
    "Qwen3NextForCausalLM": _LINEAR_ATTENTION,
    "MetaMoeForConditionalGeneration": _LINEAR_ATTENTION,
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "DeepseekV4ForCausalLM": _SPARSE,
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


def check_support(config: dict[str, Any]) -> None:
    """Raise UnsupportedFeatureError for a configuration, as ``config.json`` has it, whose model is not served."""
    names = architectures(config)
    shown = f" ({', '.join(names)})" if names else ""
    if is_vision_language(config):
        raise refuse(f"a vision-language model{shown}", "use the language model of the same family")
    for name in names:
        if name in NOT_SERVED:
            raise refuse(f"{name} ({NOT_SERVED[name]})", "use another model")
    for part, quantisation in _quantisation(config):
        method = str(quantisation.get("quant_method", "unknown"))
        if method != "awq":
            raise refuse(f"a quantised model ({method})", f"use {_OTHER_WEIGHTS}")
        _check_awq(part, quantisation)


def is_vision_language(config: dict[str, Any]) -> bool:
    """Whether LMDeploy would take the model for one of images: by its list of classes, or by a part for vision."""
    from lmdeploy.archs import check_vl_llm

    if config.get("vision_config"):
        return True
    return any(check_vl_llm("pytorch", config | {"architectures": [name]}) for name in architectures(config))


def _quantisation(config: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(configuration, how it is quantised) of a configuration, and of the one of its language model inside it."""
    for name in ("", "text_config", "llm_config", "language_config"):
        part = config.get(name) if name else config
        found = part.get("quantization_config") if isinstance(part, dict) else None
        if found:
            yield part, found if isinstance(found, dict) else {}


_OTHER_WEIGHTS = "the AWQ model of 4 bits, or the unquantised one in bfloat16 or float32"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# LMDeploy passes the names of a model's linear layers to few of its classes; these it never packs.
_NEVER_PACKED = ("lm_head", "embed_tokens", "norm")


def _check_awq(config: dict[str, Any], quantisation: dict[str, Any]) -> None:
    """Refuse what LMDeploy would take for the one layout of AWQ that it knows, or stop at in words of its own."""

    def refuse_awq(what: str) -> None:
        raise refuse(f"an AWQ model {what}", f"use {_OTHER_WEIGHTS}")

    bits, group_size = quantisation.get("bits", 4), quantisation.get("group_size", 128)
    layout = str(quantisation.get("version") or quantisation.get("format") or "gemm").lower()
    if bits != 4:
        refuse_awq(f"of {bits} bits")
    if layout != "gemm":
        refuse_awq(f"in the layout {layout!r}; LMDeploy reads 'gemm'")
    if not isinstance(group_size, int) or group_size <= 0:
        refuse_awq(f"with group_size={group_size!r}; LMDeploy needs a number of in_features")
    if not quantisation.get("zero_point", True):
        refuse_awq("without zero points, which LMDeploy reads all the same")
    apart = quantisation.get("modules_to_not_convert") or []
    if unpacked := [name for name in apart if name.rpartition(".")[2] not in _NEVER_PACKED]:
        refuse_awq(f"with layers that are not packed ({', '.join(unpacked)})")
    if any(config.get(name) for name in _EXPERTS):
        refuse_awq("with experts")
    for name in ("hidden_size", "intermediate_size"):
        size = config.get(name) or 0
        if size % group_size:
            refuse_awq(f"whose {name}={size} is no multiple of group_size={group_size}")
