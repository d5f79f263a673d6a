"""GPT-OSS's experts with weights that stay in MXFP4. LMDeploy has no layer for such weights.

While a checkpoint loads, its tensors are repacked expert by expert into the layout of ``ops.quantised.packing.MXFP4``.
Scales become bfloat16, which is exact: they are powers of two.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.moe.packed_experts import ExpertWeights, PackedExperts
from dlinfer.ops.quantised.packing import GPTQ, MXFP4

_STORED = replace(GPTQ, zero_bias=0)
"""The layout of a checkpoint's blocks: four bytes hold 8 neighbours along "in", the first in the lowest bits."""

_BIAS = 127  # of E8M0's exponents


def powers() -> Tensor:
    """Return the value of each E8M0 code: bfloat16 [256]. Code 255 is NaN."""
    values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - _BIAS).to(torch.bfloat16)
    values[255] = torch.nan
    return values


class Mxfp4Weights(ExpertWeights):
    """The weights of one projection of all experts.

    blocks: int32 [experts, in_features, out_features / 8]. scales: bfloat16 [experts, in_features / 32, out_features].
    bias: [experts, out_features], in the model's dtype. In gate_up, all out_features of gate come before those of up.
    In a checkpoint they alternate.
    """

    parts = ("blocks", "scales", "bias")

    def __init__(
        self, experts: int, into: int, out: int, is_gate_up: bool, dtype: torch.dtype | None, device: Any
    ) -> None:
        super().__init__()
        self.is_gate_up = is_gate_up
        if into % MXFP4.group_size or out % MXFP4.per_word:
            sizes = f"experts in MXFP4 with {into} inputs and {out} outputs"
            advice = "use a checkpoint whose experts have a multiple of 32 inputs and a multiple of 8 outputs"
            raise refuse(sizes, advice)
        groups, words = into // MXFP4.group_size, out // MXFP4.per_word
        self.register("blocks", (experts, into, words), MXFP4.storage, device, self.load_blocks)
        self.register("scales", (experts, groups, out), torch.bfloat16, device, self.load_scales)
        self.register("bias", (experts, out), dtype, device, self.load_bias)

    def load_blocks(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Repack a checkpoint's blocks, uint8 [experts, out, in / 32, 16], into ``param``.

        Raises UnsupportedFeatureError for other sizes.
        """
        experts, into, words = param.shape
        out = words * MXFP4.per_word
        _require("blocks", loaded_weight, (experts, out, into // MXFP4.group_size, MXFP4.group_size // 2))
        for own, blocks in zip(param.data, loaded_weight, strict=True):
            rows = blocks.flatten(1).contiguous().view(_STORED.storage)
            own.copy_(_STORED.repack(self._gate_first(rows).t(), MXFP4))

    def load_scales(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Convert a checkpoint's scales, uint8 [experts, out, in / 32], into ``param``.

        Raises UnsupportedFeatureError for other sizes.
        """
        experts, groups, out = param.shape
        _require("scales", loaded_weight, (experts, out, groups))
        values = powers().to(param.device)
        for own, scales in zip(param.data, loaded_weight, strict=True):
            own.copy_(values[self._gate_first(scales).int()].t())

    def load_bias(self, param: nn.Parameter, loaded_weight: Tensor, expert_id: int, shard_id: str) -> None:
        """Copy one expert's bias [out] into ``param``. shard_id: the bias's projection: gate, up or down."""
        mine, half = param.data[expert_id], param.shape[1] // 2
        {"gate": mine[:half], "up": mine[half:], "down": mine}[shard_id].copy_(loaded_weight)

    def _gate_first(self, rows: Tensor) -> Tensor:
        return torch.cat([rows[::2], rows[1::2]]) if self.is_gate_up else rows


def _require(part: str, stored: Tensor, shape: tuple[int, ...]) -> None:
    if stored.dtype is not torch.uint8 or stored.shape != shape:
        what = (
            f"{part} of experts in MXFP4 with {stored.dtype} {tuple(stored.shape)} instead of uint8 {shape}"
        )
        raise refuse(what, "use a checkpoint whose config.json belongs to its weights")


class FusedMoEMxfp4:
    """GPT-OSS's experts, computed on packed weights."""

    def __init__(self, alpha: float, limit: float) -> None:
        self.alpha, self.limit = alpha, limit

    def forward(self, hidden_states: Tensor, weights: Tensor, ids: Tensor, *parts: Tensor) -> Tensor:
        """Return a tensor of hidden_states' shape [tokens, hidden].

        parts: blocks, scales and bias of gate_up, then blocks, scales and bias of down.
        """
        return ops.fused_moe_mxfp4(hidden_states, *parts, weights, ids, self.alpha, self.limit)


def mxfp4_experts(
    hidden: int, inner: int, experts: int, dtype: torch.dtype | None, device: Any, act_func: Any
) -> PackedExperts:
    """Return the layer of GPT-OSS's experts. act_func: LMDeploy's ``GateupAct`` with its ``alpha`` and ``limit``."""
    gate_up = Mxfp4Weights(experts, hidden, 2 * inner, True, dtype, device)
    down = Mxfp4Weights(experts, inner, hidden, False, dtype, device)
    return PackedExperts(FusedMoEMxfp4(float(act_func.alpha), float(act_func.limit)), gate_up, down)
