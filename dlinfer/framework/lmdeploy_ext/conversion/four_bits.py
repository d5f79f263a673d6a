"""Weights of 4 bits as AWQ's layers of LMDeploy take them.

Those layers have one group size for the whole model, which divides the in_features of each, and where LMDeploy joins
layers their out_features too. A stored group that does not, or that spans all in_features, becomes several smaller ones
with the same scale and zero point.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint
from dlinfer.ops.quantised.packing import AWQ, Packing

_SCALES = torch.float16  # the dtype of LMDeploy's parameter
INTERMEDIATE = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Keys of a configuration for the in_features of down projections, those of experts too."""


def stored_group(group_size: Any, checkpoint: Checkpoint) -> int:
    """A group size as a configuration has it; 0 stands for all in_features. Raises UnsupportedFeatureError."""
    checkpoint.require(
        type(group_size) is int and (group_size == -1 or group_size > 0), f"in groups of {group_size}"
    )
    return max(group_size, 0)


def awq_config(stored: int, checkpoint: Checkpoint) -> dict[str, Any]:
    """The configuration of AWQ for groups of ``stored`` in_features. Raises UnsupportedFeatureError for sizes."""
    model = checkpoint.model
    hidden = model.get("hidden_size") and model.get("num_attention_heads")
    checkpoint.require(hidden, "without hidden_size and num_attention_heads")
    given = linear_sizes(model)
    for name, size in given.items():
        checkpoint.require(
            size % AWQ.per_word == 0, f"whose {name} = {size} is no multiple of {AWQ.per_word}"
        )
    group = math.gcd(stored, *given.values())
    sizes = ", ".join(f"{name} = {size}" for name, size in given.items())
    checkpoint.require(
        group % 8 == 0, f"in groups of {stored or 'all'} inputs, whose sizes have no group: {sizes}"
    )
    return checkpoint.named(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }
    )


def linear_sizes(model: Mapping[str, Any]) -> dict[str, int]:
    """The in_features and out_features of a decoder's linear layers, by what the configuration calls them."""
    hidden, heads = model.get("hidden_size") or 0, model.get("num_attention_heads") or 1
    size = model.get("head_dim") or hidden // heads
    found = {
        "hidden_size": hidden,
        **{name: model.get(name) or 0 for name in INTERMEDIATE},
        "num_attention_heads * head_dim": heads * size,
        "num_key_value_heads * head_dim": (model.get("num_key_value_heads") or heads) * size,
    }
    return {name: size for name, size in found.items() if size}


def weight(name: str, words: Tensor, packing: Packing) -> tuple[str, Tensor]:
    """The packed weight of the layer ``name``; words: as ``packing`` has them."""
    return f"{name}.qweight", packing.repack(words, AWQ)


def scales(name: str, given: Tensor, stored: int, layer: Any, checkpoint: Checkpoint) -> tuple[str, Tensor]:
    """The scales [groups, out_features], float16, of ``given`` of the stored groups, any floating dtype."""
    made = given.to(_SCALES)
    checkpoint.require(made.isfinite().all(), f"with scales of {name} beyond float16")
    return f"{name}.scales", _spread(name, made, stored, layer, checkpoint).contiguous()


def zeros(name: str, given: Tensor, stored: int, layer: Any, checkpoint: Checkpoint) -> tuple[str, Tensor]:
    """The packed zero points of ``given``, whole numbers [stored groups, out_features]."""
    fit = (given >= 0).all() and (given < 2**AWQ.bits).all()
    # Of GPTQ's first format: 15 stands for 0 or for 16, and takes from its neighbour in some files and not in others.
    checkpoint.require(fit, f"with a zero point of {name} that 4 bits do not hold")
    return f"{name}.qzeros", AWQ.pack_zeros(_spread(name, given, stored, layer, checkpoint))


def require_order(name: str, group_of: Tensor, stored: int, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedFeatureError unless neighbouring inputs share groups. group_of: [in_features], or empty."""
    size = group_of.numel()
    expected = torch.arange(size, device=group_of.device) // (stored or max(size, 1))
    checkpoint.require(
        torch.equal(group_of.long(), expected),
        f"with desc_act: the inputs of {name} are grouped in another order",
    )


def _spread(name: str, rows: Tensor, stored: int, layer: Any, checkpoint: Checkpoint) -> Tensor:
    """Rows of the stored groups as rows of the layer's groups."""
    checkpoint.require(layer is not None, f"with a layer {name} that LMDeploy's class has not")
    into = layer.in_features
    size = stored or into
    expected = math.ceil(into / size)
    what = f"with {rows.shape[0]} groups of {size} inputs in {name}, which has {into}"
    checkpoint.require(rows.shape[0] == expected, what)
    if layer.group_size == size:
        return rows
    which = torch.arange(into // layer.group_size, device=rows.device) * layer.group_size // size
    return rows[which]


def without_zero_bias(name: str, bias: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
    """A bias, but none of zeros where the layer has none: some tools store one for every layer they quantise."""
    if layer is None or layer.bias is not None or bias.any():
        yield f"{name}.bias", bias
