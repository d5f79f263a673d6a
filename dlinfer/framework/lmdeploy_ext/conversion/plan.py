"""Decides from a model's configuration whether its checkpoint is converted, and how. Reads no weights."""

from collections.abc import Mapping
from typing import Any

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import (
    AS_STORED,
    CONVERTED_FROM,
    FLOATS,
    Checkpoint,
    Plan,
    language_configs,
)
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.gguf.folder import GGUF_FILE

_AUTO, _KEPT, _BF12 = "auto", "kept", "bf12"
_CONVERTED = ("gptq", "compressed-tensors", "mxfp4")
QUANTISED_FORMATS = ("awq", *_CONVERTED)
"""Values of LMDeploy's option model_format that we accept. They are for checkpoints that are already quantised."""


def plan_of(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan | None:
    """Return the plan that converts a quantised checkpoint; None if its quantisation method needs no conversion.

    config: the checkpoint's ``quantization_config``. model: the contents of config.json. Raises UnsupportedFeatureError
    for a checkpoint that cannot be converted.
    """
    method = config.get("quant_method")
    if method == "fp8" and model.get("model_type") == "deepseek_v4":
        from dlinfer.framework.lmdeploy_ext.conversion import deepseek_v4

        return deepseek_v4.plan(config, model)
    if (
        method not in _CONVERTED
        or CONVERTED_FROM in config
        or AS_STORED in (model.get("architectures") or ())
    ):
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
    return Plan(None, lambda name, tensor, layer: [(name, tensor)], experts="mxfp4")


def asked_bits() -> str:
    """Return ``bf12``, ``int8`` or ``int4`` if DLINFER_CPU_WEIGHTS asks for it, else an empty text.

    The result is empty too unless the active device uses the host's memory.
    """
    bits = settings.current().cpu_weights
    return bits if bits not in (_AUTO, _KEPT) and _shares_memory() else ""


def packs_in_place(hf_config: Any) -> str:
    """Return how LMDeploy's own layers are packed while they load: ``bf12``, ``int8``, ``int4``, or an empty text.

    LMDeploy gets no ``quantization_config`` then. A quantised model stays as it is. int8 and int4 of the classes that
    ``asked_plan`` converts are packed before LMDeploy gets the tensors.
    """
    return asked_bits() if _is_in_floats(hf_config) else ""


def packs_if_faster(hf_config: Any) -> bool:
    """Return whether a measurement decides if the weights are packed to ``bf12``: DLINFER_CPU_WEIGHTS=auto."""
    is_asked = settings.current().cpu_weights == _AUTO and _shares_memory()
    return is_asked and _is_in_floats(hf_config)


def _shares_memory() -> bool:
    return activation.active() is not None and activation.device().memory().shared


def _is_in_floats(hf_config: Any) -> bool:
    # ``rewrite`` sets experts_packed_as if it removes a quantised checkpoint's configuration.
    names = ("quantization_config", "experts_packed_as", GGUF_FILE)
    return all(getattr(part, name, None) is None for part in language_configs(hf_config) for name in names)


def packs_head(hf_config: Any) -> bool:
    """Return whether the output projection is packed to int8.

    DLINFER_CPU_HEAD decides. If it is unset, the output projection is packed if DLINFER_CPU_WEIGHTS packs the other
    weights to int8 or int4. It is never packed on a device with a memory of its own. hf_config: transformers'
    configuration, whose ``quantization_config`` is the one that LMDeploy gets.
    """
    asked = settings.current().cpu_head
    if asked == _KEPT or not _shares_memory():
        return False
    rounds = packs_in_place(hf_config) not in ("", _BF12)
    return bool(asked) or rounds or is_packed_as_it_loads(getattr(hf_config, "quantization_config", None))


def is_packed_as_it_loads(config: Any) -> bool:
    """Return whether ``config`` tells LMDeploy that floating-point files are packed while they load.

    config: LMDeploy's ``quantization_config``. For DLINFER_CPU_WEIGHTS=int8 or int4, dlinfer makes it.
    """
    return isinstance(config, Mapping) and str(config.get(CONVERTED_FROM, "")).startswith(FLOATS)


def asked_plan(model: Mapping[str, Any]) -> Plan | None:
    """Return the plan that packs a checkpoint to int8 or int4; None unless DLINFER_CPU_WEIGHTS asks for one of them.

    It is None too for classes that LMDeploy cannot build quantised (``packs_in_place``). model: the contents of
    config.json, without a ``quantization_config``. Raises UnsupportedFeatureError if the model cannot be packed.
    """
    bits = asked_bits()
    if bits in ("", _BF12) or GGUF_FILE in model or rounded_in_place(model):
        return None
    from dlinfer.framework.lmdeploy_ext.conversion import floats  # see ``plan_of``

    return floats.plan(bits, model)


def rounded_in_place(model: Mapping[str, Any]) -> str:
    """Return ``int8`` or ``int4`` if DLINFER_CPU_WEIGHTS asks for it, and LMDeploy cannot build the class quantised.

    The result is an empty text otherwise. model: the contents of config.json, without a ``quantization_config``.
    """
    bits = asked_bits()
    if bits in ("", _BF12):
        return ""
    from dlinfer.framework.lmdeploy_ext.conversion import floats  # see ``plan_of``

    return "" if set(model.get("architectures") or [""]) <= set(floats.ADMITTED[bits]) else bits
