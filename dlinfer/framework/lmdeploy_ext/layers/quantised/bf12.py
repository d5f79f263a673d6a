"""Layers whose bfloat16 weights are packed without loss as BF12, 12 bits for each number.

A packed weight is a flat tensor of bytes (``ops.quantised.bf12``), so the layers store its numbers of rows and columns.
``packing`` packs weights while a model loads.
"""

from typing import Any

import torch
from lmdeploy.pytorch.backends.linear import LinearImpl
from lmdeploy.pytorch.backends.moe import FusedMoEImpl
from torch import Tensor, nn

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.layers.quantised.packing import Form, Weight
from dlinfer.framework.lmdeploy_ext.layers.quantised.table import Table
from dlinfer.ops.quantised import bf12


class LinearBF12(LinearImpl):
    """x @ weight.T + bias for a packed weight. The result is bitwise equal to that of the unpacked weight."""

    def __init__(self, out_features: int, in_features: int) -> None:
        self.out_features, self.in_features = out_features, in_features

    def get_unquantized_weight(self, weight: Tensor) -> Tensor:
        """Return the unpacked weight, a new bfloat16 tensor [out_features, in_features]. weight: uint8, packed."""
        return bf12.unpack(weight, self.out_features, self.in_features)

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
        """Return a new bfloat16 tensor [..., out]. x: bfloat16 [..., in]. weight: uint8 [bytes]. bias: [out]."""
        rows = {"out_features": self.out_features, "all_reduce": all_reduce, "group": group}
        return ops.linear_bf12(x, weight, bias, **rows)


class ExpertsBF12(FusedMoEImpl):
    """Gated experts with silu and packed weights. The result is bitwise equal to that of the unpacked weights.

    settings: the op's keyword arguments.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def forward(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Any, *weights: Any, **more: Any
    ) -> Tensor:
        """Return a new tensor [N, hidden]. hidden_states: bfloat16 [N, hidden].

        weights: five arguments: gate_up and down of all experts, uint8 [bytes]; two biases, always None; the list of
        experts.
        """
        gate_up, down, gate_up_bias, down_bias, _ = weights
        others = (gate_up_bias, down_bias, more.get("act_func"))
        assert all(part is None for part in others), "those are not packed"
        return ops.fused_moe_bf12(hidden_states, gate_up, down, topk_weights, topk_ids, **self.settings)


class _PackedTable(Table):
    """A table in BF12. table: uint8 [bytes], which packs ``rows`` tokens with ``columns`` hidden features each."""

    def __init__(self, table: nn.Parameter, rows: int, columns: int) -> None:
        super().__init__(torch.bfloat16)
        self.table, self.rows, self.columns = table, rows, columns


class HeadBF12(_PackedTable):
    """The output projection (``lm_head``) in BF12."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a new bfloat16 tensor [..., vocabulary]. x: bfloat16 [..., hidden]."""
        return ops.linear_bf12(x, self.table, out_features=self.rows)


class EmbeddingBF12(_PackedTable):
    """An embedding that reads its rows from a ``HeadBF12``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a new bfloat16 tensor [..., hidden]. x: token ids [...]."""
        return ops.embedding_bf12(x, self.table, self.rows, self.columns)


class BF12(Form):
    """The same bfloat16 numbers in 12 bits. A packed weight is one flat tensor of bytes.

    BF12 encodes 15 neighbouring exponents. A number with another exponent takes extra bytes.
    """

    bits = "bf12"
    dtypes = (torch.bfloat16,)
    linear_ops, experts_ops, table_op = ("linear_bf12",), ("fused_moe_bf12",), "embedding_bf12"

    def least_bytes(self, rows: int, columns: int) -> int | None:
        return bf12.packed_bytes(rows, columns)

    def pack(self, weight: Tensor, name: str) -> tuple[Tensor, ...]:
        rows = weight.flatten(0, -2)
        packed = activation.device().pack_bf12(rows)  # the device's own function is faster
        return (bf12.pack(rows) if packed is None else packed,)

    def unpack(self, parts: tuple[Tensor, ...], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return bf12.unpack(parts[0], rows, columns)

    def linear(self, weight: Weight) -> Any:
        return LinearBF12(weight.rows, weight.columns)

    def experts(self, layer: Any, gate_up: Weight, down: Weight) -> Any:
        return ExpertsBF12(
            renormalize=layer.impl.renormalize, num_experts=layer.num_experts, intermediate_size=down.columns
        )

    def tables(self, weight: Weight) -> tuple[Table, Table]:
        numbers = nn.Parameter(weight.parameter.data, requires_grad=False)
        parts = (numbers, weight.rows, weight.columns)
        return HeadBF12(*parts), EmbeddingBF12(*parts)
