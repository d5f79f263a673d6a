"""Decides from a model's configuration whether its checkpoint is converted, and how. Reads no weights."""

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
from dlinfer.framework.lmdeploy_ext.gguf.folder import GGUF_FILE

_BF12 = "bf12"
_CONVERTED = ("gptq", "compressed-tensors", "mxfp4")
QUANTISED_FORMATS = ("awq", *_CONVERTED)
"""Values of LMDeploy's option model_format that we accept. They are for checkpoints that are already quantised."""


def plan_of(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan | None:
    """Return the plan that converts a quantised checkpoint; None if its quantisation method needs no conversion.

    config: the checkpoint's ``quantization_config``. model: the contents of config.json. Raises UnsupportedFeatureError
    for a checkpoint that cannot be converted.
    """
    method = config.get("quant_method")
    if method not in _CONVERTED or CONVERTED_FROM in config:
        return None
    if method == "mxfp4":
        return _mxfp4(config, model)
    # These modules import the ops, which must not load at every import of LMDeploy.
    from dlinfer.framework.lmdeploy_ext.conversion import compressed_tensors, gptq

    return (gptq if method == "gptq" else compressed_tensors).plan(config, model)


def _mxfp4(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan:
    """Return the plan of gpt-oss with experts in MXFP4 (4-bit floats). Raises UnsupportedFeatureError for other models.

    LMDeploy does not know this method and loads an unquantised model. Our layer in ``layers/moe`` takes the tensors
    unchanged. Format: OCP Microscaling Formats specification 1.0. Each projection of the experts has ``..._blocks``
    uint8 [experts, out, in / 32, 16] and ``..._scales`` uint8 [experts, out, in / 32]. Each byte of ``..._blocks``
    holds two E2M1 numbers, the first in the lower half. Each scale is a power of two in E8M0. All other weights have 16
    bits.
    """
    is_known = model.get("model_type") == "gpt_oss"
    Checkpoint("mxfp4", config, model).require(is_known, "in a model other than gpt-oss")
    return Plan(None, lambda name, tensor, layer: [(name, tensor)])


def asked_bits() -> str:
    """Return the value of DLINFER_CPU_WEIGHTS. It is empty unless the active device uses the host's memory."""
    bits = settings.current().cpu_weights
    return bits if bits and activation.active() is not None and activation.device().memory().shared else ""


def packs_bf12(hf_config: Any) -> bool:
    """Return whether a model's weights are packed to BF12: if DLINFER_CPU_WEIGHTS=bf12, and the model is not quantised.

    BF12 packing is lossless, so LMDeploy gets no ``quantization_config`` and builds its usual layers.
    """
    # ``rewrite`` sets experts_packed_as if it removes a quantised checkpoint's configuration.
    names = ("quantization_config", "experts_packed_as", GGUF_FILE)
    quantised = (getattr(part, name, None) for part in language_configs(hf_config) for name in names)
    return asked_bits() == _BF12 and all(value is None for value in quantised)


def packs_head(config: Any) -> bool:
    """Return whether the output projection is packed to int8.

    DLINFER_CPU_HEAD decides. If it is unset, the output projection is packed if DLINFER_CPU_WEIGHTS packs the other
    weights to int8 or int4. It is never packed on a device with a memory of its own. config: LMDeploy's
    ``quantization_config``, or None if the model is not quantised.
    """
    asked = settings.current().cpu_head
    if activation.active() is None or not activation.device().memory().shared or asked == "kept":
        return False
    return bool(asked) or is_packed_as_it_loads(config)


def is_packed_as_it_loads(config: Any) -> bool:
    """Return whether ``config`` tells LMDeploy that floating-point files are packed while they load.

    config: LMDeploy's ``quantization_config``. For DLINFER_CPU_WEIGHTS=int8 or int4, dlinfer makes it.
    """
    return isinstance(config, Mapping) and str(config.get(CONVERTED_FROM, "")).startswith(FLOATS)


def asked_plan(model: Mapping[str, Any]) -> Plan | None:
    """Return the plan that packs a checkpoint to int8 or int4; None unless DLINFER_CPU_WEIGHTS asks for one of them.

    model: the contents of config.json, without a ``quantization_config``. Raises UnsupportedFeatureError if the model
    cannot be packed.
    """
    bits = asked_bits()
    if not bits or bits == _BF12 or GGUF_FILE in model:
        return None
    from dlinfer.framework.lmdeploy_ext.conversion import floats  # see ``plan_of``

    return floats.plan(bits, model)
