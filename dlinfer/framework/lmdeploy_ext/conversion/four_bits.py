"""Converts weights of 4 bits, in the layouts of GPTQ and compressed-tensors, to what LMDeploy's AWQ layers load.

Those layers have one group size for the whole model. It divides the in_features of each layer, and the out_features of
layers that LMDeploy joins. A stored group that does not fit, or that spans all in_features, becomes several smaller
groups with the same scale and zero point.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Plan, awq_config, linear_sizes
from dlinfer.ops.quantised.packing import AWQ, Packing

_PARTS = {"qweight": "words", "scales": "scales", "qzeros": "zeros", "g_idx": "order"}
_PARTS |= {"weight_packed": "words", "weight_scale": "scales", "weight_zero_point": "zeros"}
_PARTS |= {"weight_g_idx": "order"}


def stored_group(group_size: Any, checkpoint: Checkpoint) -> int:
    """A configuration's group size; 0 stands for all in_features. Raises UnsupportedFeatureError."""
    is_size = type(group_size) is int and (group_size == -1 or group_size > 0)
    checkpoint.require(is_size, f"in groups of {group_size}")
    return max(group_size, 0)


def require_order(name: str, group_of: Tensor, stored: int, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedFeatureError unless neighbouring inputs share groups. group_of: [in_features], or empty."""
    size = group_of.numel()
    expected = torch.arange(size, device=group_of.device) // (stored or max(size, 1))
    in_order = torch.equal(group_of.long(), expected)
    checkpoint.require(in_order, f"with desc_act: the inputs of {name} are grouped in another order")


@dataclass(frozen=True)
class FourBits:
    """How a checkpoint's weights lie. stored: its group size, 0 for all in_features. packing: of its words.

    transposed: whether tensors are [out, in], as compressed-tensors has them. symmetric: whether there are no zero
    points.
    """

    checkpoint: Checkpoint
    stored: int
    packing: Packing
    transposed: bool = False
    symmetric: bool = False

    def plan(self) -> Plan:
        """The plan of the checkpoint. Raises UnsupportedFeatureError for sizes that AWQ's layers cannot have."""
        model, require = self.checkpoint.model, self.checkpoint.require
        has_sizes = model.get("hidden_size") and model.get("num_attention_heads")
        require(has_sizes, "without hidden_size and num_attention_heads")
        sizes = linear_sizes(model)
        for name, size in sizes.items():
            require(size % AWQ.per_word == 0, f"whose {name} = {size} is no multiple of {AWQ.per_word}")
        group = math.gcd(self.stored, *sizes.values())
        shown = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        require(
            group % 8 == 0, f"in groups of {self.stored or 'all'} inputs, whose sizes have no group: {shown}"
        )
        return Plan(self.checkpoint.named(awq_config(group)), self.convert)

    def convert(self, name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        """Yield AWQ's tensors for one of the checkpoint's."""
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
        self.checkpoint.require(is_packed, f"with {owner} quantised, which LMDeploy's class has in floats")
        if kind == "order":
            require_order(owner, tensor, self.stored, self.checkpoint)
            return
        table = tensor.t() if self.transposed else tensor
        if kind == "words":
            yield f"{owner}.qweight", self.packing.repack(table, AWQ)
        elif kind == "scales":
            yield f"{owner}.scales", self._scales(owner, table, layer)
            if self.symmetric:
                middle = torch.full(table.shape, self.packing.middle, dtype=torch.int32)
                yield f"{owner}.qzeros", self._zeros(owner, middle, layer)
        elif not self.symmetric:
            yield f"{owner}.qzeros", self._zeros(owner, self.packing.unpack_zeros(table), layer)

    def _scales(self, name: str, stored: Tensor, layer: Any) -> Tensor:
        """Scales [groups, out_features] in the dtype of LMDeploy's parameter."""
        scales = stored.to(torch.float16)
        self.checkpoint.require(scales.isfinite().all(), f"with scales of {name} beyond float16")
        return self._spread(name, scales, layer).contiguous()

    def _zeros(self, name: str, zeros: Tensor, layer: Any) -> Tensor:
        """Packed zero points from whole numbers [stored groups, out_features]."""
        fit = (zeros >= 0).all() and (zeros < 2**AWQ.bits).all()
        # In GPTQ's first format 15 stands for 0 or for 16, and carries into its neighbour in some files only.
        self.checkpoint.require(fit, f"with a zero point of {name} that 4 bits do not hold")
        return AWQ.pack_zeros(self._spread(name, zeros, layer))

    def _spread(self, name: str, rows: Tensor, layer: Any) -> Tensor:
        """Rows of the stored groups as rows of the layer's groups."""
        self.checkpoint.require(layer is not None, f"with a layer {name} that LMDeploy's class has not")
        inputs = layer.in_features
        size = self.stored or inputs
        detail = f"with {rows.shape[0]} groups of {size} inputs in {name}, which has {inputs}"
        self.checkpoint.require(rows.shape[0] == math.ceil(inputs / size), detail)
        if layer.group_size == size:
            return rows
        groups = torch.arange(inputs // layer.group_size, device=rows.device) * layer.group_size // size
        return rows[groups]
