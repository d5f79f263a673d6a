"""Decides from a configuration alone which checkpoints are converted, and how."""

from collections.abc import Mapping
from typing import Any

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import (
    CONVERTED_FROM,
    FLOATS,
    Checkpoint,
    Plan,
    language_configs,
)
from dlinfer.framework.lmdeploy_ext.device import activation

_BF12 = "bf12"
_CONVERTED = ("gptq", "compressed-tensors", "mxfp4")
QUANTISED_FORMATS = ("awq", *_CONVERTED)
"""Values of LMDeploy's option model_format for checkpoints that are quantised already."""


def plan_of(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan | None:
    """How a checkpoint is converted; None for a method that is not: LMDeploy reads it, or nothing does.

    config: its ``quantization_config``. model: its whole configuration. Raises UnsupportedFeatureError.
    """
    method = config.get("quant_method")
    if method not in _CONVERTED or CONVERTED_FROM in config:
        return None
    if method == "mxfp4":
        return _mxfp4(config, model)
    # These import the ops, which must not load for everybody who imports LMDeploy.
    from dlinfer.framework.lmdeploy_ext.conversion import compressed_tensors, gptq

    return (gptq if method == "gptq" else compressed_tensors).plan(config, model)


def _mxfp4(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan:
    """The plan of gpt-oss with experts in 4-bit floats. Raises UnsupportedFeatureError for another model.

    Format: OCP Microscaling Formats specification 1.0. Each projection of the experts has ``..._blocks`` uint8
    [experts, out, in / 32, 16] and ``..._scales`` uint8 [experts, out, in / 32]. A byte of blocks is two numbers E2M1,
    the first in the lower half; a scale is a power of two in E8M0. All else is in 16 bits. LMDeploy does not know the
    method: it loads a model in floats, whose layer of ``layers/moe`` takes those tensors as they are.
    """
    is_known = model.get("model_type") == "gpt_oss"
    Checkpoint("mxfp4", config, model).require(is_known, "in another model than gpt-oss")
    return Plan(None, lambda name, tensor, layer: [(name, tensor)])


def asked_bits() -> str:
    """The value of DLINFER_CPU_WEIGHTS on a device whose weights lie in the host's memory; empty for floats."""
    bits = settings.current().cpu_weights
    return bits if bits and activation.active() is not None and activation.device().memory().shared else ""


def packs_bf12(hf_config: Any) -> bool:
    """Whether DLINFER_CPU_WEIGHTS asks for a model's weights in 12 bits, and its checkpoint is in floats.

    Packing in 12 bits changes no number, so LMDeploy gets no ``quantization_config`` and its layers stay.
    """
    # ``rewrite`` leaves the second where LMDeploy gets no configuration for a quantised checkpoint.
    names = ("quantization_config", "experts_packed_as")
    quantised = (getattr(part, name, None) for part in language_configs(hf_config) for name in names)
    return asked_bits() == _BF12 and all(value is None for value in quantised)


def packs_head(config: Any) -> bool:
    """Whether the output projection is packed to int8: DLINFER_CPU_HEAD decides, or else the other weights.

    config: a model's ``quantization_config`` in LMDeploy, or None.
    """
    asked = settings.current().cpu_head
    if activation.active() is None or not activation.device().memory().shared or asked == "kept":
        return False
    return bool(asked) or is_packed_as_it_loads(config)


def is_packed_as_it_loads(config: Any) -> bool:
    """Whether a model's ``quantization_config`` stands for DLINFER_CPU_WEIGHTS, while its files are in floats."""
    return isinstance(config, Mapping) and str(config.get(CONVERTED_FROM, "")).startswith(FLOATS)


def asked_plan(model: Mapping[str, Any]) -> Plan | None:
    """How DLINFER_CPU_WEIGHTS packs a checkpoint in floats; None where it does not, or for another device.

    model: its whole configuration, without a ``quantization_config``. Raises UnsupportedFeatureError.
    """
    bits = asked_bits()
    if not bits or bits == _BF12:
        return None
    from dlinfer.framework.lmdeploy_ext.conversion import floats  # see ``plan_of``

    return floats.plan(bits, model)
