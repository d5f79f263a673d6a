"""Plans the conversion of 4-bit GPTQ checkpoints to AWQ. Reads the layouts of AutoGPTQ and GPTQModel.

GPTQ: Frantar et al., 2022, arXiv:2210.17323. Each linear layer has ``qweight`` int32 [in / 8, out], ``qzeros`` int32
[groups, out / 8] and ``scales`` [groups, out]. Some files also have ``g_idx`` [in], the group of each input.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Plan
from dlinfer.framework.lmdeploy_ext.conversion.four_bits import FourBits, stored_group
from dlinfer.ops.quantised.packing import GPTQ

_FORMATS = {"gptq": GPTQ, "gptq_v2": replace(GPTQ, zero_bias=0)}
# A decoder's linear layers. If a configuration lists the quantised layers, it must list all of these.
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's names


def plan(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan:
    """Return the plan that converts a GPTQ checkpoint to AWQ.

    config: the checkpoint's ``quantization_config``. model: the contents of config.json. Raises UnsupportedFeatureError
    for a checkpoint that cannot be converted.
    """
    checkpoint = Checkpoint("gptq", config, model)
    bits, layout = config.get("bits"), config.get("checkpoint_format") or config.get("format") or "gptq"
    words = str(config.get("pack_dtype") or "int32")
    rule = _rule_of_its_own(config.get("dynamic") or {})
    unpacked = _unlisted(config.get("modules_in_block_to_quantize"))
    checkpoint.require(bits == 4, f"of {bits} bits")
    checkpoint.require(layout in _FORMATS, f"in the layout {layout!r}")
    checkpoint.require(not config.get("is_marlin_format"), "in the layout 'marlin'")
    checkpoint.require(not config.get("desc_act"), "with desc_act, which groups inputs in another order")
    checkpoint.require(words == "int32", f"packed in {words}")
    checkpoint.require(not config.get("lm_head"), "with lm_head quantised")
    checkpoint.require(not rule, f"with another rule for some layers (dynamic: {rule})")
    checkpoint.require_packed(not unpacked, ", ".join(unpacked))
    checkpoint.require_served_experts()
    checkpoint.require_plain()
    stored = stored_group(config.get("group_size", 128), checkpoint)
    return FourBits(checkpoint, stored, _FORMATS[str(layout)]).plan()


def _unlisted(modules: Any) -> list[str]:
    """Return the linear layers of a decoder that are missing in a configuration's list of quantised modules.

    modules: the list. If it is None, all layers are quantised, and the result is empty.
    """
    names = [name for part in modules or () for name in ([part] if isinstance(part, str) else part)]
    listed = {_EXPERTS.get(last, last) for last in (name.rpartition(".")[2] for name in names)}
    return sorted(set(_LAYERS) - listed) if names else []


def _rule_of_its_own(rules: Mapping[str, Any]) -> str:
    """Return the first of GPTQModel's ``dynamic`` rules that we cannot follow; an empty text if there is none.

    A rule is a regular expression for layer names. With the prefix ``-:`` it keeps the matching layers in floats. We
    can follow such a rule if it matches no linear layer of the decoder other than routers. A rule without the prefix
    gives the matching layers other options, which we cannot follow.
    """
    inside = ("self_attn", "mlp", "mlp.experts.0", "mlp.shared_expert")
    names = [f"model.layers.0.{part}.{name}" for part in inside for name in _LAYERS]
    names += [f"model.layers.0.block_sparse_moe.experts.0.{name}" for name in _EXPERTS]
    for rule in rules:
        pattern = rule.removeprefix("-:")
        try:
            if pattern == rule or any(re.match(pattern, name) for name in names):
                return rule
        except re.error:  # an invalid pattern counts as a match
            return rule
    return ""
