"""Refuses drafts of a model unless ``PAIRS`` lists the method, the target's architecture and the draft's class.

For these pairs of target and draft, a test showed the same tokens as the target generates alone. LMDeploy accepts other
pairs too, but fails with a KeyError, either after the weights are loaded or in a step.
"""

from typing import Any

from dlinfer import settings
from dlinfer.errors import SettingError
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import language_configs
from dlinfer.framework.lmdeploy_ext.conversion.plan import asked_bits
from dlinfer.framework.lmdeploy_ext.device import devices
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers import block_diffusion
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_parameters
from dlinfer.framework.lmdeploy_ext.ngram.method import METHOD

_LLAMA = ("LlamaForCausalLM",)

PAIRS = {
    "eagle": (_LLAMA, "EagleLlamaForCausalLM"),
    "eagle3": (_LLAMA, "Eagle3LlamaForCausalLM"),
    "deepseek_mtp": (("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), "DeepseekMTPModel"),
    "qwen3_5_mtp": (
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        "Qwen3_5MTPModel",
    ),
}
"""Method of a SpeculativeConfig -> (architectures of the target, LMDeploy's class of the draft)."""

_OWN_LAYERS = {"deepseek_mtp": "num_nextn_predict_layers", "qwen3_5_mtp": "mtp_num_hidden_layers"}
"""Method whose draft is a part of the target -> the field of config.json that counts the draft's layers."""

_WITHOUT = "leave speculative_config out"


def check_request(speculative: Any, engine: Any) -> None:
    """Raise UnsupportedFeatureError if this SpeculativeConfig is not served together with this PytorchEngineConfig.

    speculative: the SpeculativeConfig. engine: the PytorchEngineConfig.
    """
    method = speculative.method
    if method not in (*PAIRS, METHOD):
        advice = f"use one of {', '.join((*PAIRS, METHOD))}, or {_WITHOUT}"
        raise refuse(f"speculative decoding (method {method!r})", advice)
    if speculative.num_speculative_tokens < 1:
        raise refuse(f"num_speculative_tokens={speculative.num_speculative_tokens}", "use 1 or more")
    if method == METHOD:
        _check_lookup(speculative)
        return
    if engine.adapters or devices.reserved_rows(engine.device_type):
        raise refuse(
            "speculative decoding with LoRA adapters",
            "leave out speculative_config, or the adapters and DLINFER_CPU_ADAPTER_ROWS",
        )
    if not speculative.model and method not in _OWN_LAYERS:
        raise refuse(
            f"speculative decoding (method {method!r}) without a draft model",
            "set SpeculativeConfig.model to its folder",
        )
    if method == "qwen3_5_mtp":
        _check_with_states(speculative, engine)


def _check_with_states(speculative: Any, engine: Any) -> None:
    """Raise UnsupportedFeatureError for what was never compared with drafts for layers of linear attention."""
    method = speculative.method
    if speculative.model:
        raise refuse(f"speculative method {method!r} with model={speculative.model!r}", "leave model out")
    if not devices.shares_host(engine.device_type):
        raise refuse(f"speculative method {method!r}", _WITHOUT, engine.device_type)
    for option in ("enable_prefix_caching", "language_model_only"):
        if getattr(engine, option):
            raise refuse(f"speculative method {method!r} with {option}", "leave one of them out")
    if policy := int(engine.quant_policy or 0):
        raise refuse(f"speculative method {method!r} with quant_policy={policy}", "use quant_policy=0")
    if (bits := asked_bits()) in ("int8", "int4"):
        raise refuse(f"speculative method {method!r} with DLINFER_CPU_WEIGHTS={bits}", "unset it")
    vendor, engine_name = devices.vendor_of(engine.device_type), settings.current().engine
    if vendor is None or engine_name not in ("", vendor.default_engine):
        feature = f"speculative method {method!r} with DLINFER_ENGINE={engine_name}"
        raise refuse(feature, f"unset DLINFER_ENGINE, or {_WITHOUT}")


def _check_lookup(speculative: Any) -> None:
    if speculative.model:
        raise refuse(f"speculative method {METHOD!r} with model={speculative.model!r}", "leave model out")
    configured = settings.current()
    if configured.prompt_lookup_min > configured.prompt_lookup_max:
        raise SettingError(
            variable="DLINFER_PROMPT_LOOKUP_MIN",
            given=str(configured.prompt_lookup_min),
            expected=f"at most DLINFER_PROMPT_LOOKUP_MAX, {configured.prompt_lookup_max}",
        )


def check_target(config: Any, method: str) -> None:
    """Raise UnsupportedFeatureError unless ``method`` is served with this target.

    config: the target's transformers configuration, before LMDeploy changes it.
    """
    if getattr(config, "model_type", "") in block_diffusion.MODEL_TYPES:
        raise refuse("speculative decoding with a model that decodes by block diffusion", _WITHOUT)
    if method in PAIRS:
        _check_pair(config, method)
    text = language_configs(config)[-1]
    if rope_parameters.original_length(text) is not None:
        kind = rope_parameters.rope_type(rope_parameters.parameters(text))
        raise refuse(f"speculative decoding with rope type {kind!r}", _WITHOUT)


def _check_pair(config: Any, method: str) -> None:
    targets, _ = PAIRS[method]
    name = (config.architectures or [""])[0]
    if name not in targets:
        raise refuse(
            f"speculative method {method!r} with {name}",
            f"use a target of class {' or '.join(targets)}, or {_WITHOUT}",
        )
    parts = language_configs(config)
    if method == "qwen3_5_mtp" and any(getattr(part, "quantization_config", None) for part in parts):
        raise refuse(f"speculative method {method!r} with a quantised checkpoint", _WITHOUT)
    layers = parts[-1].num_hidden_layers
    if method == "eagle3" and len({2, layers // 2, layers - 3} & set(range(1, layers))) < 3:
        reads = f"LMDeploy's draft reads the inputs of layers 2, {layers // 2} and {layers - 3}"
        feature = f"speculative method 'eagle3' with a target of {layers} layers ({reads})"
        raise refuse(feature, f"use a larger target, or {_WITHOUT}")


def check_states(model_config: Any) -> None:
    """Raise UnsupportedFeatureError for a model whose layers keep a state that rejected drafts would change.

    model_config: LMDeploy's ModelConfig of the target.
    """
    if model_config.states_shapes or model_config.state_cache_specs:
        name = model_config.hf_config.architectures[0]
        raise refuse(f"speculative method {METHOD!r} with {name}, whose layers keep states", _WITHOUT)


def check_draft(config: Any, method: str) -> None:
    """Raise UnsupportedFeatureError unless ``method`` is served with this draft.

    config: the draft's transformers configuration, before LMDeploy changes it.
    """
    name = (config.architectures or [""])[0]
    if method in _OWN_LAYERS:
        field = _OWN_LAYERS[method]
        layers = getattr(language_configs(config)[-1], field, 0)
        if not layers:
            raise refuse(f"speculative method {method!r} without {field} in config.json", _WITHOUT)
        if method == "qwen3_5_mtp" and layers != 1:
            raise refuse(f"speculative method {method!r} with {field} = {layers}", _WITHOUT)
    elif name not in _LLAMA:
        raise refuse(
            f"a draft of {name} for {method!r}", "use a draft whose config.json names LlamaForCausalLM"
        )
    elif method == "eagle3" and not getattr(config, "draft_vocab_size", 0):
        raise refuse(
            "a draft for 'eagle3' without draft_vocab_size in its config.json", "use an EAGLE-3 draft"
        )
