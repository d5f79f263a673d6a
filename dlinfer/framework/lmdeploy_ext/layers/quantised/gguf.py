"""Layers whose weights stay in the blocks of a GGUF file.

A packed weight is a flat tensor of bytes (``ops.quantised.gguf``), so the layers store its types and numbers of rows.
``gguf_packing`` fills the weights while a model loads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from lmdeploy.pytorch.backends.linear import LinearImpl
from lmdeploy.pytorch.backends.moe import FusedMoEImpl
from torch import Tensor, nn

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.layers.quantised.table import Table
from dlinfer.ops.quantised import gguf


class LinearGguf(LinearImpl):
    """x @ weight.T + bias for a weight of one or more matrices in blocks, such as q, k and v."""

    def __init__(
        self, types: Sequence[int], rows: Sequence[int], in_features: int, dtype: torch.dtype
    ) -> None:
        self.types, self.rows, self.in_features, self.dtype = list(types), list(rows), in_features, dtype

    def get_unquantized_weight(self, weight: Tensor) -> Tensor:
        """Return the unpacked weight, a new tensor [out_features, in_features]. weight: uint8, packed."""
        return gguf.unpack(weight, self.types, self.rows, self.in_features, self.dtype)

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
        *unused: Any,
        **more: Any,
    ) -> Tensor:
        """Return a new tensor [..., out] of x's dtype. x: [..., in]. weight: uint8 [bytes]. bias: [out]."""
        sizes = {"types": self.types, "rows": self.rows}
        return ops.linear_gguf(x, weight, bias, **sizes, all_reduce=all_reduce, group=group)


class ExpertsGguf(FusedMoEImpl):
    """Gated experts with silu and weights in blocks.

    settings: the op's keyword arguments.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def forward(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Any, *weights: Any, **more: Any
    ) -> Tensor:
        """Return a new tensor [N, hidden]. hidden_states: [N, hidden].

        weights: five arguments: gate_up and down, uint8 [experts, bytes]; two biases, always None; the list of experts.
        """
        gate_up, down, gate_up_bias, down_bias, _ = weights
        others = (gate_up_bias, down_bias, more.get("act_func"))
        assert all(part is None for part in others), "those are not packed"
        return ops.fused_moe_gguf(hidden_states, gate_up, down, topk_weights, topk_ids, **self.settings)


class _TableGguf(Table):
    """A table in blocks. table: uint8 [bytes], for ``rows`` tokens with ``columns`` hidden features each."""

    def __init__(self, table: nn.Parameter, kind: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.table, self.kind, self.rows, self.columns = table, kind, rows, columns


class HeadGguf(_TableGguf):
    """The output projection (``lm_head``) in blocks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a new tensor [..., vocabulary] of x's dtype. x: [..., hidden]."""
        return ops.linear_gguf(x, self.table, types=[self.kind], rows=[self.rows])


class EmbeddingGguf(_TableGguf):
    """The embedding in blocks. It may share its table with a ``HeadGguf``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a new tensor [..., hidden] of the model's dtype. x: token ids [...]."""
        return ops.embedding_gguf(x, self.table, self.kind, self.rows, self.columns, self.weight.dtype)
