"""Patches LoRA adapters of a model that runs on several ranks.

Each rank multiplies by its part of A or of B: A of the layers whose inputs are split, B of the layers whose outputs are
split. The parts of A's layers are summed together with the layer itself.
"""

from typing import Any

from torch import Tensor, nn

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device import activation, ranks
from dlinfer.framework.patching import Original, replaces

_patched = {"when": activation.is_on, "for_feature": ranks.FEATURE}


@replaces(
    "lmdeploy.pytorch.nn.linear.base:LinearBase._forward_lora",
    why="calls torch.distributed, which graph mode captures with two copies, and which does not use shared memory",
    **_patched,
)
def _forward_lora(original: Original, self: Any, x: Tensor, tp_sizes: Any = None) -> Tensor:
    out = self._forward_default(x, False, tp_sizes)
    for adapter in self.lora_adapters.values():
        out = adapter(x, out)
    return ops.all_reduce(out, self.tp_group) if self.all_reduce else out


@replaces(
    "lmdeploy.pytorch.nn.linear.lora:LoRA.weight_loader_B",
    why="splits B of k and v into as many parts as ranks, though ranks share heads if there are fewer heads than ranks",
    **_patched,
)
def _load_b(
    original: Original, self: Any, param: nn.Parameter, loaded_weight: Tensor, adapter_id: int
) -> None:
    from lmdeploy.pytorch.distributed import get_tp_world_rank

    if self.is_tp and self.colwise and self.lora_b_spliter is None:
        count, rank = get_tp_world_rank()
        parts = len(loaded_weight) // self.adapter_info.out_features
        begin = self.adapter_info.rank_offsets[adapter_id]
        rows = param.data[begin : begin + self.adapter_info.ranks[adapter_id]]
        rows.copy_(loaded_weight.chunk(parts)[rank * parts // count].t())
    else:
        original(self, param, loaded_weight, adapter_id)
