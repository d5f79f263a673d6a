"""Layers whose bfloat16 weights are packed as BF12: 12 bits a number, and every bit comes back.

A weight is one flat table of bytes, as ``ops.quantised.bf12`` lays it out. How many numbers it stands for is passed
beside it. ``bf12_packing`` makes them while a model loads.
"""

from typing import Any

import torch
from lmdeploy.pytorch.backends.linear import LinearImpl
from lmdeploy.pytorch.backends.moe import FusedMoEImpl
from torch import Tensor, nn

from dlinfer import ops
from dlinfer.ops.quantised import bf12


class LinearBF12(LinearImpl):
    """x @ weight.T + bias, bit for bit that of the weight which was packed."""

    def __init__(self, out_features: int, in_features: int) -> None:
        self.out_features, self.in_features = out_features, in_features

    def update_weights(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """As they are: a packed weight has one layout, whatever DLINFER_LINEAR_USE_NN_LAYOUT says of plain ones."""
        return weight, bias

    def get_unquantized_weight(self, weight: Tensor) -> Tensor:
        """weight: uint8, packed. Returns a new bfloat16 tensor [out_features, in_features]."""
        return bf12.unpack(weight, self.out_features, self.in_features)

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
        rank: int = 0,
        scatter_size: list[int] | None = None,
    ) -> Tensor:
        """x bfloat16 [..., in], weight uint8 [bytes], bias [out]. Returns a new bfloat16 tensor [..., out]."""
        assert not all_reduce, "weights that several processes share are not packed"
        return ops.linear_bf12(x, weight, bias, out_features=self.out_features)


class ExpertsBF12(FusedMoEImpl):
    """Gated experts with silu, bit for bit those of the weights that were packed."""

    def __init__(self, renormalize: bool, num_experts: int, intermediate_size: int) -> None:
        self.renormalize, self.num_experts = renormalize, num_experts
        self.intermediate_size = intermediate_size

    def update_weights(self, gate_up_weights: Tensor, down_weights: Tensor) -> tuple[Tensor, Tensor]:
        """As they are."""
        return gate_up_weights, down_weights

    def forward(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Any,
        gate_up_weights: Tensor,
        down_weights: Tensor,
        gate_up_bias: Any = None,
        down_bias: Any = None,
        expert_list: Any = None,
        act_func: Any = None,
    ) -> Tensor:
        """hidden_states bfloat16 [N, hidden] -> new [N, hidden]; both weights uint8 [bytes], each a whole stack."""
        assert gate_up_bias is None and down_bias is None and act_func is None, "those are not packed"
        return ops.fused_moe_bf12(
            hidden_states,
            gate_up_weights,
            down_weights,
            topk_weights,
            topk_ids,
            renormalize=self.renormalize,
            num_experts=self.num_experts,
            intermediate_size=self.intermediate_size,
        )


class _Table(nn.Module):
    """Rows, packed. ``weight`` stands in for the weight of LMDeploy's layer, which is asked for its dtype and handed
    from the embedding to the projection where they are tied: it holds nothing."""

    def __init__(self, table: nn.Parameter, rows: int, columns: int) -> None:
        """table: uint8, packed, of ``rows`` words and ``columns`` hidden numbers."""
        super().__init__()
        self.table, self.rows, self.columns = table, rows, columns
        self.weight = torch.empty(0, dtype=torch.bfloat16)


class HeadBF12(_Table):
    """``lm_head``, packed."""

    def __init__(self, table: nn.Parameter, rows: int, columns: int) -> None:
        super().__init__(table, rows, columns)
        self.impl = LinearBF12(rows, columns)

    def forward(self, x: Tensor) -> Tensor:
        """x bfloat16 [..., hidden] -> new bfloat16 [..., vocabulary]."""
        return self.impl.forward(x, self.table)


class EmbeddingBF12(_Table):
    """An embedding that reads its rows from a ``HeadBF12``."""

    def forward(self, x: Tensor) -> Tensor:
        """x [...], whole numbers below the vocabulary's size -> new bfloat16 [..., hidden]."""
        return ops.embedding_bf12(x, self.table, self.rows, self.columns)
