"""Checkpoints of compressed-tensors in which experts alone are packed, as LMDeploy's own layer takes them.

That layer has symmetric groups of 32 inputs with scales in bfloat16. A stored group that is a multiple of that becomes
several with the same scale.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion import four_bits
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Plan

_GROUP = 32
_DOWN = ("down_proj", "w2")
_WEIGHTS = {
    "num_bits": 4,
    "group_size": _GROUP,
    "strategy": "group",
    "symmetric": True,
    "dynamic": False,
    "type": "int",
}
_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
    "ignore": [
        r"re:(?!.*\.experts$)"
    ],  # every layer of LMDeploy's but those; it joins some under names of its own
}


def plan(stored: int, symmetric: bool, checkpoint: Checkpoint) -> Plan:
    """The plan of a checkpoint whose groups have ``stored`` inputs, 0 for all. Raises UnsupportedFeatureError."""
    alone = "with experts alone"
    checkpoint.require(symmetric, f"{alone}, with zero points")
    checkpoint.require(stored % _GROUP == 0, f"{alone}, in groups of {stored}, no multiple of {_GROUP}")
    sizes = {name: checkpoint.model.get(name) or 0 for name in ("hidden_size", "moe_intermediate_size")}
    for name, size in sizes.items():
        checkpoint.require(
            size and size % _GROUP == 0, f"{alone}, whose {name} = {size} is no multiple of {_GROUP}"
        )
    hidden, inner = sizes.values()

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        owner, _, part = name.rpartition(".")
        if ".experts." not in owner:
            checkpoint.require(
                part != "weight_packed", f"with {owner} quantised, which its rules leave in floats"
            )
            yield name, tensor
        elif part == "weight_scale":
            into = inner if owner.rpartition(".")[2] in _DOWN else hidden
            yield name, _spread(name, tensor, stored or into, into, checkpoint)
        elif part == "weight_shape":
            yield name, tensor.to(torch.int32)
        elif part == "weight_g_idx":
            four_bits.require_order(owner, tensor, stored, checkpoint)
        else:
            checkpoint.require_packed(part == "weight_packed", owner)
            yield name, tensor

    return Plan(checkpoint.named(_CONFIG), convert)


def _spread(name: str, given: Tensor, group: int, into: int, checkpoint: Checkpoint) -> Tensor:
    """Scales [out, groups of ``group``] in any floating dtype as bfloat16 [out, groups of 32]."""
    groups = -(-into // group)
    what = f"with {given.shape[1]} groups of {group} inputs in {name}, which has {into}"
    checkpoint.require(given.shape[1] == groups, what)
    made = given.to(torch.bfloat16)
    checkpoint.require(
        torch.equal(made.to(given.dtype), given), f"with scales of {name} that bfloat16 has not"
    )
    return made[:, torch.arange(into // _GROUP) * _GROUP // group]
