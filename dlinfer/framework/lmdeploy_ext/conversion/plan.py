"""Which checkpoints are converted, and how: a plan, made of a configuration alone."""

from collections.abc import Mapping
from typing import Any

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import CONVERTED_FROM, Plan
from dlinfer.framework.lmdeploy_ext.device import activation

_BF12 = "bf12"
_CONVERTED = ("gptq", "compressed-tensors", "mxfp4")
QUANTISED_FORMATS = ("awq", *_CONVERTED)
"""Values of LMDeploy's option model_format that name a way in which a checkpoint is quantised already."""


def plan_of(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan | None:
    """How a checkpoint is converted, or None for a method that is not: LMDeploy reads it, or nothing does.

    config: its ``quantization_config``. model: its whole configuration. Raises UnsupportedFeatureError.
    """
    method = config.get("quant_method")
    if method not in _CONVERTED or CONVERTED_FROM in config:  # one that was made here has nothing left to do
        return None
    # They know packings, and with them the ops, which are not loaded for all who import LMDeploy.
    from dlinfer.framework.lmdeploy_ext.conversion import compressed_tensors, gptq, mxfp4

    return {"gptq": gptq, "compressed-tensors": compressed_tensors, "mxfp4": mxfp4}[method].plan(
        config, model
    )


def asked_bits() -> str:
    """What DLINFER_CPU_WEIGHTS says, on a device whose weights lie in the host's memory; empty for floats."""
    bits = settings.current().cpu_weights
    return bits if bits and activation.active() is not None and activation.device().memory().shared else ""


def packs_bf12(hf_config: Any) -> bool:
    """Whether DLINFER_CPU_WEIGHTS asks for a model's weights in 12 bits, and its checkpoint is not quantised already.

    It changes no number, so that LMDeploy is given no ``quantization_config``: its layers stay what they are.
    """
    return asked_bits() == _BF12 and not _is_quantised(hf_config)


def _is_quantised(hf_config: Any) -> bool:
    """Whether a configuration, or one of a language model inside it, says how its checkpoint is quantised."""
    parts = (hf_config, *(getattr(hf_config, name, None) for name in ("llm_config", "text_config")))
    # A conversion that leaves LMDeploy no configuration says so by the second.
    names = ("quantization_config", "experts_packed_as")
    return any(getattr(part, name, None) is not None for part in parts for name in names)


def packs_head(config: Any) -> bool:
    """Whether the output projection is packed to int8: DLINFER_CPU_HEAD says so, or leaves it to the other weights.

    config: a model's ``quantization_config`` as LMDeploy has it, or None.
    """
    asked = settings.current().cpu_head
    if activation.active() is None or not activation.device().memory().shared or asked == "kept":
        return False
    if asked or not isinstance(config, Mapping):
        return bool(asked)
    from dlinfer.framework.lmdeploy_ext.conversion import floats  # see ``plan_of``

    return floats.is_packed(config)


def asked_plan(model: Mapping[str, Any]) -> Plan | None:
    """How DLINFER_CPU_WEIGHTS packs a checkpoint in floats; None where it does not, on another device among them.

    model: its whole configuration, with no ``quantization_config``. Raises UnsupportedFeatureError.
    """
    bits = asked_bits()
    if not bits or bits == _BF12:
        return None
    from dlinfer.framework.lmdeploy_ext.conversion import floats  # see ``plan_of``

    return floats.plan(bits, model)
