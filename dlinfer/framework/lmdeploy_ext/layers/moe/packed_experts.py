"""A layer of experts whose weights are of 4 bits in AWQ's layout, in which LMDeploy has linear layers alone.

Its parameters have the names that LMDeploy's classes of models look for while they load: ``gate_up`` and ``down``, and
of each the parts that a checkpoint has. Gate and up stand side by side along out_features, words beside each other.
"""

from typing import Any

import torch
from lmdeploy.pytorch.nn.moe.base import FusedMoEBase
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.quantised.four_bit_experts import FusedMoEW4A16
from dlinfer.ops.quantised.packing import AWQ


class PackedWeights(nn.Module):
    """The weights of one projection of all experts.

    qweight: int32 [experts, in_features, out_features / 8]. scales: float16 [experts, groups, out_features]. qzeros:
    int32 [experts, groups, out_features / 8].
    """

    bias = None  # as linear layers say that they have none
    qweight: nn.Parameter
    scales: nn.Parameter
    qzeros: nn.Parameter

    def __init__(
        self, experts: int, in_features: int, out_features: int, group_size: int, device: torch.device | None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        if in_features % group_size or out_features % AWQ.per_word:
            sizes = f"experts of {in_features} inputs and {out_features} outputs in groups of {group_size}"
            raise refuse(sizes, "use a checkpoint whose groups divide the experts' sizes")
        groups, words = in_features // group_size, out_features // AWQ.per_word
        self._register("qweight", torch.empty(experts, in_features, words, dtype=AWQ.storage, device=device))
        self._register(
            "scales", torch.empty(experts, groups, out_features, dtype=torch.float16, device=device)
        )
        self._register("qzeros", torch.empty(experts, groups, words, dtype=AWQ.storage, device=device))

    def _register(self, name: str, data: Tensor) -> None:
        parameter: Any = nn.Parameter(data, requires_grad=False)
        parameter.weight_loader = self.weight_loader
        self.register_parameter(name, parameter)

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: Tensor, expert_id: int, shard_id: str
    ) -> None:
        """Copy one expert's part into ``param``; LMDeploy's loaders call it.

        shard_id: gate or up, each one half of the columns, or down. Raises UnsupportedFeatureError for other sizes.
        """
        mine, half = param.data[expert_id], param.shape[2] // 2
        columns = {"gate": mine[:, :half], "up": mine[:, half:], "down": mine}[shard_id]
        if columns.shape != loaded_weight.shape:
            what = f"a part of an expert's {shard_id} of {tuple(loaded_weight.shape)}, not {tuple(columns.shape)}"
            raise refuse(what, "use a checkpoint whose config.json is its own")
        columns.copy_(loaded_weight)


class PackedExperts(FusedMoEBase):
    """Gated experts with silu, of one device: tensor parallelism is refused before. Raises UnsupportedFeatureError."""

    def __init__(
        self,
        hidden_dim: int,
        ffn_dim: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool,
        group_size: int,
        device: torch.device | None,
    ) -> None:
        self.init_dist_args(all_reduce=False)
        if self.ep > 1:
            raise refuse(f"expert parallelism (ep_size={self.ep})", "set ep=1")
        super().__init__(tp=self.tp, tp_mode=self.tp_mode, do_renormalize=renormalize)
        self.impl = FusedMoEW4A16(top_k, renormalize, group_size)
        self.gate_up = PackedWeights(num_experts, hidden_dim, 2 * ffn_dim, group_size, device)
        self.down = PackedWeights(num_experts, ffn_dim, hidden_dim, group_size, device)

    def forward(self, hidden_states: Tensor, topk_weights: Tensor, topk_idx: Any) -> Tensor:
        """hidden_states [tokens, hidden], topk_weights and topk_idx [tokens, top_k] -> [tokens, hidden]."""
        gate_up, down = self.gate_up, self.down
        return self.impl.forward(
            hidden_states,
            topk_weights,
            topk_idx,
            gate_up.qweight,
            gate_up.scales,
            down.qweight,
            down.scales,
            gate_up.qzeros,
            down.qzeros,
        )
