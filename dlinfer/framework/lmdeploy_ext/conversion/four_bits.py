"""Converts 4-bit weights from the layouts of GPTQ and compressed-tensors to the layouts of LMDeploy's layers.

LMDeploy's AWQ layers have one group size for the whole model. It must divide the in_features of each layer, and the
out_features of layers that LMDeploy joins into one. LMDeploy's experts for compressed-tensors have symmetric groups of
32 inputs with bfloat16 scales. If the files have larger groups, each group becomes several groups with equal scales and
zero points.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Plan, linear_sizes, shown
from dlinfer.framework.lmdeploy_ext.conversion.formats import AwqInt4
from dlinfer.ops.quantised.packing import AWQ, Packing

_PARTS = {"qweight": "words", "scales": "scales", "qzeros": "zeros", "g_idx": "order"}
_PARTS |= {"weight_packed": "words", "weight_scale": "scales", "weight_zero_point": "zeros"}
_PARTS |= {"weight_g_idx": "order"}


def stored_group(group_size: Any, checkpoint: Checkpoint) -> int:
    """Return the group size that ``group_size`` stands for: 0 for -1, which means one group of all in_features.

    group_size: the value in the configuration. Raises UnsupportedFeatureError unless it is -1 or a positive integer.
    """
    is_size = type(group_size) is int and (group_size == -1 or group_size > 0)
    checkpoint.require(is_size, f"in groups of {group_size}")
    return max(group_size, 0)


def _require_order(name: str, group_of: Tensor, stored: int, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedFeatureError unless groups consist of neighbouring inputs, and are in ascending order.

    name: the layer's name. group_of: ``g_idx`` [in_features], the group of each input; or an empty tensor. stored: the
    group size; 0 if all inputs form one group.
    """
    size = group_of.numel()
    expected = torch.arange(size, device=group_of.device) // (stored or max(size, 1))
    in_order = torch.equal(group_of.long(), expected)
    checkpoint.require(in_order, f"with desc_act, which groups the inputs of {name} in another order")


def _spread(name: str, rows: Tensor, inputs: int, stored: int, group: int, checkpoint: Checkpoint) -> Tensor:
    """Repeat the row of each stored group, once for each smaller group of ``group`` inputs inside the stored group.

    rows: the scales or zero points, with one row for each stored group. inputs: the layer's in_features. stored: the
    stored group size; 0 if all inputs form one group. name: the tensor's name, for error texts.
    """
    size = stored or inputs
    detail = f"with {rows.shape[0]} groups of {size} inputs in {name}, which has {inputs} inputs"
    checkpoint.require(rows.shape[0] == math.ceil(inputs / size), detail)
    return rows if size == group else rows[torch.arange(inputs // group) * group // size]


def _fits(stored: Tensor, scales: Tensor) -> bool:
    """Return whether scales are finite in float16, and none is so small there that it loses precision.

    stored: the scales in the file's dtype. scales: the same in float16.
    """
    is_normal = scales.abs() >= torch.finfo(torch.float16).smallest_normal
    is_exact = scales.to(stored.dtype) == stored
    return bool((scales.isfinite() & (is_normal | is_exact)).all())


@dataclass(frozen=True)
class FourBits:
    """The layout of a checkpoint's 4-bit weights, and their conversion to AWQ.

    stored: the group size; 0 if all in_features form one group. packing: the layout of the numbers in 32-bit words.
    transposed: whether the stored tensors are [out, in], as in compressed-tensors. symmetric: whether the files have no
    zero points.
    """

    checkpoint: Checkpoint
    stored: int
    packing: Packing
    transposed: bool = False
    symmetric: bool = False

    def plan(self) -> Plan:
        """Return the plan of the conversion to AWQ. Raises UnsupportedFeatureError for sizes that AWQ cannot pack."""
        model, require = self.checkpoint.model, self.checkpoint.require
        has_sizes = model.get("hidden_size") and model.get("num_attention_heads")
        require(has_sizes, "without hidden_size and num_attention_heads")
        sizes = linear_sizes(model)
        for name, size in sizes.items():
            require(size % AWQ.per_word == 0, f"whose {name} = {size} is not a multiple of {AWQ.per_word}")
        group = math.gcd(self.stored, *sizes.values())
        detail = f"in groups of {self.stored or 'all'} inputs, which do not fit its sizes: {shown(sizes)}"
        require(group % 8 == 0, detail)
        return Plan(self.checkpoint.named(AwqInt4(group).config()), self.convert)

    def convert(self, name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        """Yield the AWQ tensors that replace the tensor ``name`` of the checkpoint. Yield none if AWQ does not need it.

        layer: LMDeploy's linear layer that owns the tensor; None for other tensors.
        """
        owner, _, part = name.rpartition(".")
        kind = _PARTS.get(part)
        if kind is None:
            self.checkpoint.require_packed(part != "weight" or not hasattr(layer, "group_size"), owner)
            # Some tools store a bias of zeros for every layer that they quantise.
            is_spare = part == "bias" and layer is not None and layer.bias is None and not tensor.any()
            if part != "weight_shape" and not is_spare:
                yield name, tensor
            return
        is_packed = layer is None or hasattr(layer, "group_size")
        self.checkpoint.require(is_packed, f"with {owner} quantised, which LMDeploy's class builds in floats")
        if kind == "order":
            _require_order(owner, tensor, self.stored, self.checkpoint)
            return
        table = tensor.t() if self.transposed else tensor
        if kind == "words":
            yield f"{owner}.qweight", self.packing.repack(table, AWQ)
            return
        zeros = None if self.symmetric or kind == "scales" else self.packing.unpack_zeros(table)
        if kind == "scales":
            scales = table.to(torch.float16)  # the dtype of LMDeploy's parameter
            detail = f"with scales of {owner} that float16 cannot hold (too large or too small)"
            self.checkpoint.require(_fits(table, scales), detail)
            yield f"{owner}.scales", self._spread(owner, scales, layer).contiguous()
            if self.symmetric:
                zeros = torch.full(table.shape, self.packing.middle, dtype=torch.int32)
        if zeros is not None:
            fit = (zeros >= 0).all() and (zeros < 2**AWQ.bits).all()
            # In GPTQ's first format 15 stands for 0 or for 16, and carries into its neighbour in some files only.
            self.checkpoint.require(fit, f"with a zero point of {owner} that does not fit into 4 bits")
            yield f"{owner}.qzeros", AWQ.pack_zeros(self._spread(owner, zeros, layer))

    def _spread(self, name: str, rows: Tensor, layer: Any) -> Tensor:
        self.checkpoint.require(layer is not None, f"with a layer {name} that LMDeploy's class does not have")
        is_split = not getattr(layer, "colwise", True)  # each rank's layer has a part of the inputs
        inputs = layer.in_features * (layer.tp if is_split else 1)
        return _spread(name, rows, inputs, self.stored, layer.group_size, self.checkpoint)


# --- experts alone

_GROUP = 32
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}
_GROUPS = {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS | {"symmetric": True, "dynamic": False}}}
_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": _GROUPS,
    "ignore": [r"re:(?!.*\.experts$)"],  # all of LMDeploy's layers but experts, also joined layers
}


def plan_of_experts(stored: int, symmetric: bool, checkpoint: Checkpoint) -> Plan:
    """Return the plan that converts a compressed-tensors checkpoint with only the experts packed.

    stored: the group size; 0 if all inputs form one group. Raises UnsupportedFeatureError for zero points, and for
    sizes and group sizes that are not multiples of 32.
    """

    def require(is_served: Any, detail: str) -> None:
        checkpoint.require(is_served, f"with only the experts quantised, {detail}")

    require(symmetric, "with zero points")
    require(stored % _GROUP == 0, f"in groups of {stored}, which is not a multiple of {_GROUP}")
    sizes = {name: checkpoint.model.get(name) or 0 for name in ("hidden_size", "moe_intermediate_size")}
    for name, size in sizes.items():
        require(size and size % _GROUP == 0, f"whose {name} = {size} is not a multiple of {_GROUP}")
    hidden, inner = sizes.values()

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        owner, _, part = name.rpartition(".")
        if ".experts." not in owner:
            is_float = part != "weight_packed"
            checkpoint.require(is_float, f"with {owner} quantised, which its ignore rules leave in floats")
        elif part == "weight_scale":
            scales = tensor.to(torch.bfloat16)
            is_exact = torch.equal(scales.to(tensor.dtype), tensor)
            inputs = inner if owner.endswith((".down_proj", ".w2")) else hidden
            tensor = _spread(name, scales.t(), inputs, stored, _GROUP, checkpoint).t().contiguous()
            checkpoint.require(is_exact, f"with scales in {name} that bfloat16 cannot represent")
        elif part == "weight_shape":
            tensor = tensor.to(torch.int32)
        elif part == "weight_g_idx":
            _require_order(owner, tensor, stored, checkpoint)
            return
        else:
            checkpoint.require_packed(part == "weight_packed", owner)
        yield name, tensor

    return Plan(checkpoint.named(_CONFIG), convert)
