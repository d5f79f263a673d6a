"""Plans checkpoints of compressed-tensors with experts alone packed, for LMDeploy's own layer of experts.

That layer has symmetric groups of 32 inputs with scales in bfloat16. A stored group that is a multiple of 32 becomes
several with the same scale.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Plan
from dlinfer.framework.lmdeploy_ext.conversion.four_bits import require_order

_GROUP = 32
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}
_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": _WEIGHTS | {"symmetric": True, "dynamic": False}}
    },
    # All of LMDeploy's layers but experts; it joins some under names of its own.
    "ignore": [r"re:(?!.*\.experts$)"],
}


def plan(stored: int, symmetric: bool, checkpoint: Checkpoint) -> Plan:
    """The plan of a checkpoint whose groups have ``stored`` inputs, 0 for all. Raises UnsupportedFeatureError."""

    def require(is_served: Any, detail: str) -> None:
        checkpoint.require(is_served, f"with experts alone, {detail}")

    require(symmetric, "with zero points")
    require(stored % _GROUP == 0, f"in groups of {stored}, no multiple of {_GROUP}")
    sizes = [checkpoint.model.get(name) or 0 for name in ("hidden_size", "moe_intermediate_size")]
    for name, size in zip(("hidden_size", "moe_intermediate_size"), sizes, strict=True):
        require(size and size % _GROUP == 0, f"whose {name} = {size} is no multiple of {_GROUP}")
    hidden, inner = sizes

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        owner, _, part = name.rpartition(".")
        if ".experts." not in owner:
            is_float = part != "weight_packed"
            checkpoint.require(is_float, f"with {owner} quantised, which its rules leave in floats")
        elif part == "weight_scale":
            inputs = inner if owner.endswith((".down_proj", ".w2")) else hidden
            tensor = _spread(name, tensor, stored or inputs, inputs, checkpoint)
        elif part == "weight_shape":
            tensor = tensor.to(torch.int32)
        elif part == "weight_g_idx":
            require_order(owner, tensor, stored, checkpoint)
            return
        else:
            checkpoint.require_packed(part == "weight_packed", owner)
        yield name, tensor

    return Plan(checkpoint.named(_CONFIG), convert)


def _spread(name: str, stored: Tensor, group: int, inputs: int, checkpoint: Checkpoint) -> Tensor:
    """Scales [out, groups of ``group``] in any floating dtype as bfloat16 [out, groups of 32]."""
    detail = f"with {stored.shape[1]} groups of {group} inputs in {name}, which has {inputs}"
    checkpoint.require(stored.shape[1] == -(-inputs // group), detail)
    scales = stored.to(torch.bfloat16)
    is_exact = torch.equal(scales.to(stored.dtype), stored)
    checkpoint.require(is_exact, f"with scales of {name} that bfloat16 has not")
    return scales[:, torch.arange(inputs // _GROUP) * _GROUP // group]
