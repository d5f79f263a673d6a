"""Patches which part of an AWQ linear layer a rank loads.

A rank has whole outputs of q, k, v, gate and up, and whole groups of inputs of the other two projections. The check
``checks.model.tensor_parallel`` refuses models whose sizes do not divide so.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.device import activation, ranks
from dlinfer.framework.patching import Original, replaces

_LAYERS = "lmdeploy.pytorch.nn.linear.awq"


@replaces(
    f"{_LAYERS}:QKVAwqLinear.weight_loader",
    why="gives each rank whole groups of outputs, though groups are of inputs; so ranks get unequal numbers of heads",
    when=activation.is_on,
    for_feature=ranks.FEATURE,
)
def _load_qkv(original: Original, self: Any, param: Any, loaded_weight: Tensor, shard_id: str) -> None:
    count, rank = self.get_tp_world_rank()
    if shard_id != "q":  # with more ranks than heads, ranks share a head of k and v
        count, rank = count // self.num_replicate_kv_heads, rank // self.num_replicate_kv_heads
    per_word = 1 if param._weight_type in ("scales", "bias") else self.elem_per_int
    sizes = [size // per_word for size in self.all_out_features]
    own = param.data.split(sizes, -1)[self.out_names_map[shard_id]]
    own.copy_(loaded_weight.chunk(count, -1)[rank])


@replaces(
    f"{_LAYERS}:AwqLinear._weight_loader_tp_rowwise",
    why="adds the bias of o or down once for each rank but the first",
    when=activation.is_on,
    for_feature=ranks.FEATURE,
)
def _load_rows(
    original: Original,
    self: Any,
    param: nn.Parameter,
    loaded_weight: Tensor,
    rank: int,
    world_size: int,
) -> None:
    from lmdeploy.pytorch.weight_loader.model_weight_loader import default_weight_loader

    if loaded_weight.dim() == 1:
        part = loaded_weight if rank == 0 else torch.zeros_like(loaded_weight)
    else:
        part = loaded_weight.chunk(world_size, 0)[rank]
    default_weight_loader(param, part)
