"""GPTQ checkpoints of 4 bits: Frantar et al., 2022, arXiv:2210.17323, as AutoGPTQ and GPTQModel store them.

Of each linear layer: ``qweight`` int32 [in / 8, out], ``qzeros`` int32 [groups, out / 8], ``scales`` [groups, out] and
``g_idx`` [in], which is left out by some.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion import four_bits
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Plan
from dlinfer.ops.quantised.packing import GPTQ

_FORMATS = {"gptq": GPTQ, "gptq_v2": replace(GPTQ, zero_bias=0)}
# A decoder's linear layers; where a configuration lists those that are quantised, it must list all.
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's names


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
    apart = _ruled_apart(config.get("dynamic") or {})
    checkpoint.require(not apart, f"with rules of their own for some layers (dynamic: {apart})")
    listed = config.get("modules_in_block_to_quantize")
    if listed:
        named = {_EXPERTS.get(name, name) for one in _flat(listed) for name in [str(one).rpartition(".")[2]]}
        apart = sorted(set(_LAYERS) - named)
        checkpoint.require_packed(not apart, ", ".join(apart))
    checkpoint.require_served_experts()
    checkpoint.require_plain()
    stored = four_bits.stored_group(config.get("group_size", 128), checkpoint)
    packing = _FORMATS[str(layout)]

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        owner, _, part = name.rpartition(".")
        if part in ("qweight", "scales", "qzeros", "g_idx"):
            checkpoint.require_floats_apart(layer, owner)
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


def _ruled_apart(rules: Mapping[str, Any]) -> str:
    """The first rule of GPTQModel's ``dynamic`` that does more than to leave routers as they are; empty for none.

    A rule is a regular expression of names, and behind ``-:`` its layers are not quantised.
    """
    names = [f"model.layers.0.{part}.{name}" for part in ("self_attn", "mlp") for name in _LAYERS]
    names += [
        f"model.layers.0.mlp.{part}.{name}" for part in ("experts.0", "shared_expert") for name in _LAYERS
    ]
    names += [f"model.layers.0.block_sparse_moe.experts.0.{name}" for name in _EXPERTS]
    for rule in rules:
        leaves = rule.removeprefix("-:")
        if leaves == rule or _matches_any(leaves, names):
            return rule
    return ""


def _matches_any(pattern: str, names: list[str]) -> bool:
    """Whether a pattern matches one of names; one that is none counts as one that does."""
    try:
        return any(re.match(pattern, name) for name in names)
    except re.error:
        return True


def _flat(names: Any) -> Iterable[Any]:
    """The names of a list, or of a list of lists, as both are written."""
    for one in names:
        if isinstance(one, list | tuple):
            yield from one
        else:
            yield one
