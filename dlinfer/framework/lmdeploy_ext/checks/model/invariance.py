"""Refuses options and models whose results depend on the batch, if DLINFER_CPU_BATCH_INVARIANT=1 forbids that."""

from typing import Any

from dlinfer import settings
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model import support
from dlinfer.framework.lmdeploy_ext.conversion.plan import packs_in_place
from dlinfer.framework.lmdeploy_ext.device import devices
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.gguf.folder import GGUF_FILE
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_parameters, windows

_DENSE = [f"{name}ForCausalLM" for name in "Llama Qwen2 Qwen3 InternLM2".split()]
COMPARED = [*_DENSE, "MixtralForCausalLM", "Qwen3MoeForCausalLM"]
"""LMDeploy's classes whose answers were compared, bit for bit, alone and in random batches."""

COMPARED_PACKED = {"awq": _DENSE, "smooth_quant": _DENSE}
"""Quantisation method -> LMDeploy's classes whose layers have batch-invariant kernels for this method."""


def is_asked(device_type: str | None) -> bool:
    """Return whether results on LMDeploy's device_type, None if it is unknown, must not depend on the batch."""
    asked = settings.current().cpu_batch_invariant
    return asked and device_type is not None and devices.shares_host(device_type)


def check_engine_config(config: Any) -> None:
    """Raise UnsupportedFeatureError for an option whose results depend on the batch.

    config: a PytorchEngineConfig.
    """
    if not is_asked(config.device_type):
        return
    ours, vendor = settings.current(), devices.vendor_of(config.device_type)
    assert vendor is not None, "the device_type is ours"
    policy = int(config.quant_policy or 0)
    for is_set, feature, advice in (
        (config.tp != 1, f"tp={config.tp}", "use tp=1"),
        (policy, f"quant_policy={policy}", "use quant_policy=0"),
        (config.adapters, "LoRA adapters", "merge the adapter into the model"),
        (ours.cpu_adapter_rows, "DLINFER_CPU_ADAPTER_ROWS", "unset DLINFER_CPU_ADAPTER_ROWS"),
        (ours.cpu_activations, "DLINFER_CPU_ACTIVATIONS=int8", "unset DLINFER_CPU_ACTIVATIONS"),
        (
            ours.engine not in ("", vendor.default_engine),
            f"DLINFER_ENGINE={ours.engine}",
            "unset DLINFER_ENGINE",
        ),
        (ours.vendor not in ("", vendor.name), f"DLINFER_VENDOR={ours.vendor}", "unset DLINFER_VENDOR"),
    ):
        if is_set:
            raise _refusal(feature, advice, config.device_type)


def check_drafts(config: Any) -> None:
    """Raise UnsupportedFeatureError if drafts are asked for. config: a PytorchEngineConfig."""
    if is_asked(config.device_type):
        raise _refusal("speculative decoding", "leave speculative_config out", config.device_type)


def check_model(hf_config: Any, device_type: str | None) -> None:
    """Raise UnsupportedFeatureError for a model that was never compared. hf_config: transformers' configuration."""
    if not is_asked(device_type):
        return
    config = hf_config.to_dict()
    names = support.architectures(config)
    if not names or not set(names) <= set(COMPARED):
        named = ", ".join(names) or "a model without a class name"
        raise _refusal(named, f"use a model of {', '.join(COMPARED)}", device_type)
    if any(windows.of_layers(hf_config) or ()):
        raise _refusal("sliding windows", "use a model without them", device_type)
    if rope_parameters.original_length(hf_config) is not None:
        kind = rope_parameters.rope_type(rope_parameters.parameters(hf_config))
        raise _refusal(f"rope type {kind!r}", "use a model whose frequencies never change", device_type)
    if GGUF_FILE in config:
        raise _refusal("a GGUF file", "use the model in the format of Hugging Face", device_type)
    if (bits := packs_in_place(hf_config)) in ("int8", "int4"):
        named = f"DLINFER_CPU_WEIGHTS={bits} of {', '.join(names)}"
        raise _refusal(named, "unset DLINFER_CPU_WEIGHTS", device_type)
    for _, stored in support.quantisation_of(config):
        method = str(stored.get("quant_method", "unknown"))
        numbers = stored.get("quant_dtype") or "int8"
        if not set(names) <= set(COMPARED_PACKED.get(method, ())) or numbers != "int8":
            named = f"{', '.join(names)} quantised as {method} ({numbers})"
            advice = f"use floating-point weights, or AWQ or W8A8 in int8 of {', '.join(_DENSE)}"
            raise _refusal(named, advice, device_type)


def _refusal(feature: str, advice: str, device_type: str | None) -> UnsupportedFeatureError:
    advice = f"{advice}, or unset DLINFER_CPU_BATCH_INVARIANT (docs/guides/batch_invariance.md)"
    return refuse(f"{feature} with DLINFER_CPU_BATCH_INVARIANT=1", advice, device_type)
