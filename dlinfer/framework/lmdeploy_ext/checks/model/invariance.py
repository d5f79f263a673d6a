"""Refuses options and models whose results depend on the batch, if DLINFER_CPU_BATCH_INVARIANT=1 forbids that."""

from typing import Any

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.checks.model import support
from dlinfer.framework.lmdeploy_ext.device import devices
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.vendor import activate_default

_NAMES = "Llama Mistral Qwen2 Qwen3 InternLM2 InternLM3 Mixtral Qwen3Moe"
COMPARED = [f"{name}ForCausalLM" for name in _NAMES.split()]
"""LMDeploy's classes whose answers were compared, bit for bit, alone and in random batches."""

COMPARED_PACKED = {
    method: [f"{name}ForCausalLM" for name in "Llama Mistral Qwen2 Qwen3 InternLM2 InternLM3".split()]
    for method in ("awq", "smooth_quant")
}
"""Quantisation method -> LMDeploy's classes that were compared with this method."""

_ADVICE = "unset DLINFER_CPU_BATCH_INVARIANT"


def is_asked(device_type: str | None) -> bool:
    """Return whether results on LMDeploy's device_type, None if it is unknown, must not depend on the batch."""
    asked = settings.current().cpu_batch_invariant
    return asked and device_type is not None and devices.torch_device(device_type) == "cpu"


def check_engine_config(config: Any) -> None:
    """Raise UnsupportedFeatureError for an option whose results depend on the batch.

    config: a PytorchEngineConfig.
    """
    device = config.device_type
    if not is_asked(device):
        return
    vendor, engine = activate_default("cpu"), settings.current().engine
    for feature, advice, is_set in (
        (f"tp={config.tp}", "use tp=1", config.tp != 1),
        (f"quant_policy={int(config.quant_policy or 0)}", "use quant_policy=0", config.quant_policy),
        ("LoRA adapters", "merge the adapter into the model", config.adapters),
        (
            "DLINFER_CPU_ACTIVATIONS=int8",
            "unset DLINFER_CPU_ACTIVATIONS",
            settings.current().cpu_activations,
        ),
        (f"DLINFER_ENGINE={engine}", "unset DLINFER_ENGINE", engine not in ("", "inductor")),
        (
            f"vendor {getattr(vendor, 'name', None)!r}",
            "set DLINFER_VENDOR=cpu",
            getattr(vendor, "name", "") != "cpu",
        ),
    ):
        if is_set:
            raise _refusal(feature, advice, device)


def check_drafts(config: Any) -> None:
    """Raise UnsupportedFeatureError if drafts are asked for. config: a PytorchEngineConfig."""
    if is_asked(config.device_type):
        raise _refusal("speculative decoding", "leave speculative_config out", config.device_type)


def check_model(config: dict[str, Any], device_type: str | None) -> None:
    """Raise UnsupportedFeatureError for a model that was never compared. config: the contents of ``config.json``."""
    if not is_asked(device_type):
        return
    names = support.architectures(config)
    if not names or not set(names) <= set(COMPARED):
        advice = f"use a model of {', '.join(COMPARED)}"
        raise _refusal(f"the model class {', '.join(names) or 'unknown'}", advice, device_type)
    for _, stored in support.quantisation_of(config):
        method = str(stored.get("quant_method", "unknown"))
        is_int8 = stored.get("quant_dtype") in (None, "int8")
        if not set(names) <= set(COMPARED_PACKED.get(method, ())) or not is_int8:
            shown = f"{', '.join(names)} quantised as {method}" + ("" if is_int8 else " in float8")
            advice = "use AWQ or W8A8 in int8 of a model without experts, or floating-point weights"
            raise _refusal(shown, advice, device_type)


def _refusal(feature: str, advice: str, device_type: str | None) -> Exception:
    return refuse(
        f"{feature} with DLINFER_CPU_BATCH_INVARIANT=1", f"{advice}, or {_ADVICE}", device_type
    )
