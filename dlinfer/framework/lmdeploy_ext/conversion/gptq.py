"""GPTQ checkpoints of 4 bits: Frantar et al., 2022, arXiv:2210.17323, as AutoGPTQ and GPTQModel store them.

Of each linear layer: ``qweight`` int32 [in / 8, out], ``qzeros`` int32 [groups, out / 8], ``scales`` [groups, out] and
``g_idx`` [in], which is left out by some.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion import four_bits
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Plan
from dlinfer.ops.packing import GPTQ

_FORMATS = {"gptq": GPTQ, "gptq_v2": replace(GPTQ, zero_bias=0)}
# A decoder's linear layers; where a configuration lists those that are quantised, it must list all.
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def plan(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan:
    """The plan of a GPTQ checkpoint, whose layers become AWQ's. Raises UnsupportedFeatureError."""
    checkpoint = Checkpoint("gptq", config, model)
    bits, layout = config.get("bits"), config.get("checkpoint_format") or config.get("format") or "gptq"
    checkpoint.require(bits == 4, f"of {bits} bits")
    checkpoint.require(layout in _FORMATS, f"in the layout {layout!r}")
    checkpoint.require(not config.get("is_marlin_format"), "in the layout 'marlin'")
    checkpoint.require(not config.get("desc_act"), "with desc_act: inputs are grouped in another order")
    checkpoint.require(
        str(config.get("pack_dtype") or "int32") == "int32", f"in words of {config.get('pack_dtype')}"
    )
    checkpoint.require(not config.get("lm_head"), "with lm_head quantised")
    checkpoint.require(not config.get("dynamic"), "with rules of their own for some layers (dynamic)")
    listed = config.get("modules_in_block_to_quantize")
    if listed:
        apart = sorted(set(_LAYERS) - {str(name).rpartition(".")[2] for name in _flat(listed)})
        checkpoint.require_packed(not apart, ", ".join(apart))
    checkpoint.require_dense()
    checkpoint.require_plain()
    stored = four_bits.stored_group(config.get("group_size", 128), checkpoint)
    packing = _FORMATS[str(layout)]

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        owner, _, part = name.rpartition(".")
        if part == "qweight":
            yield four_bits.weight(owner, tensor, packing)
        elif part == "scales":
            yield four_bits.scales(owner, tensor, stored, layer, checkpoint)
        elif part == "qzeros":
            yield four_bits.zeros(owner, packing.unpack_zeros(tensor), stored, layer, checkpoint)
        elif part == "g_idx":
            four_bits.require_order(owner, tensor, stored, checkpoint)
        elif part == "bias":
            yield from four_bits.without_zero_bias(owner, tensor, layer)
        else:
            checkpoint.require_packed(part != "weight" or not hasattr(layer, "group_size"), owner)
            yield name, tensor

    return Plan(four_bits.awq_config(stored, checkpoint), convert)


def _flat(names: Any) -> Iterable[Any]:
    """The names of a list, or of a list of lists, as both are written."""
    for one in names:
        if isinstance(one, list | tuple):
            yield from one
        else:
            yield one
