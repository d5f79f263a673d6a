"""Finds the layers of an LMDeploy model whose weights may be replaced by packed bytes while the model loads."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from lmdeploy.pytorch.backends.dlinfer.linear import DlinferLinearImpl
from lmdeploy.pytorch.nn.linear import BaseLinear, MergedBaseLinear, QKVBaseLinear
from lmdeploy.pytorch.nn.moe.default import FusedMoE
from torch import nn

from dlinfer.framework.lmdeploy_ext.layers.moe.experts import Experts
from dlinfer.framework.lmdeploy_ext.layers.quantised import table

LINEAR = (BaseLinear, MergedBaseLinear, QKVBaseLinear)
"""LMDeploy's own unquantised linear layers. They keep no other data derived from the weight."""

IsPackable = Callable[[torch.dtype], bool]
"""A function that returns whether weights of a dtype are packed."""


def layers(model: nn.Module, packs: IsPackable) -> list[Any]:
    """Return the linear layers to pack.

    The output projection is left out, because LMDeploy reads the dtype of its weight. Layers that share a weight are
    left out too.
    """
    users = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    heads = {
        id(layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if name == "head" or name.rpartition(".")[2] == "lm_head"
    }
    return [
        layer
        for layer in model.modules()
        if type(layer) in LINEAR
        and type(layer.impl) is DlinferLinearImpl
        and id(layer) not in heads
        and users[id(layer.weight)] == 1
        and is_packable(layer.weight, packs)
    ]


def experts(model: nn.Module, packs: IsPackable) -> list[Any]:
    """Return the layers of experts to pack: those of LMDeploy's unquantised class, without biases and ep."""
    return [
        layer
        for layer in model.modules()
        if type(layer) is FusedMoE
        and type(layer.impl) is Experts
        and layer.ep_size == 1
        and layer.act_func is None
        and layer.gate_up.bias is None
        and layer.down.bias is None
        and all(is_packable(part.weight, packs, 3) for part in (layer.gate_up, layer.down))
    ]


def is_packable(weight: Any, packs: IsPackable, rank: int = 2) -> bool:
    return isinstance(weight, nn.Parameter) and packs(weight.dtype) and weight.ndim == rank


def has_packable_head(model: nn.Module) -> bool:
    """Return whether the output projection may become a packed table (``table.put``).

    Only the model classes ``table.CLASSES`` use its weight for nothing else.
    """
    head: Any = getattr(model, "lm_head", None)
    return type(head) in LINEAR and head.tp == 1 and table.why_kept(model) is None


def sizes(weight: torch.Tensor) -> tuple[int, int]:
    """Return (rows, columns) of a weight, the experts of a layer counted as further rows."""
    return math.prod(weight.shape[:-1]), weight.shape[-1]
