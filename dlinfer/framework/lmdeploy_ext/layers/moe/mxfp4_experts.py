"""Experts of GPT-OSS and DeepSeek-V4 with weights that stay in MXFP4. LMDeploy has no such layer for our devices.

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
        groups, words = _groups_and_words(into, out)
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


class LimitedMxfp4Weights(ExpertWeights):
    """The weights of one projection of all experts of DeepSeek-V4.

    weight: int32 [experts, in_features, out_features / 8]. scale: bfloat16 [experts, in_features / 32, out_features].
    In gate_up, all out_features of gate come before those of up. A checkpoint has each expert's tensors by themselves.
    """

    parts = ("weight", "scale")

    def __init__(self, experts: int, into: int, outs: tuple[int, ...], device: Any) -> None:
        """Make the parameters. outs: the out_features of gate and of up, or of down alone."""
        super().__init__()
        groups = _groups_and_words(into, outs[0])[0]
        out, words = sum(outs), sum(outs) // MXFP4.per_word
        self.register("weight", (experts, into, words), MXFP4.storage, device, self.load_weight)
        self.register("scale", (experts, groups, out), torch.bfloat16, device, self.load_scale)

    def load_weight(self, param: nn.Parameter, loaded_weight: Tensor, expert_id: int, shard_id: str) -> None:
        """Repack one expert's tensor, int8 [out, in / 2], into ``param``. shard_id: gate, up or down.

        Raises UnsupportedFeatureError for other sizes.
        """
        own = _columns(param.data[expert_id], shard_id)
        shape = (own.shape[1] * MXFP4.per_word, own.shape[0] // 2)
        _require("a weight", loaded_weight, shape, torch.int8)
        own.copy_(_STORED.repack(loaded_weight.contiguous().view(_STORED.storage).t(), MXFP4))

    def load_scale(self, param: nn.Parameter, loaded_weight: Tensor, expert_id: int, shard_id: str) -> None:
        """Convert one expert's scales, E8M0 [out, in / 32], into ``param``. shard_id: gate, up or down.

        Raises UnsupportedFeatureError for other sizes.
        """
        own = _columns(param.data[expert_id], shard_id)
        _require("scales", loaded_weight, (own.shape[1], own.shape[0]), torch.float8_e8m0fnu)
        own.copy_(loaded_weight.to(torch.bfloat16).t())


def _columns(both: Tensor, shard_id: str) -> Tensor:
    """Return the part of one expert's tensor that gate, up or down takes. both: [rows, columns]."""
    half = both.shape[1] // 2
    return {"gate": both[:, :half], "up": both[:, half:], "down": both}[shard_id]


def _groups_and_words(into: int, out: int) -> tuple[int, int]:
    """Return how many groups ``into`` inputs have, and how many words ``out`` outputs.

    Raises UnsupportedFeatureError unless all groups and words are full.
    """
    if into % MXFP4.group_size or out % MXFP4.per_word:
        sizes = f"experts in MXFP4 with {into} inputs and {out} outputs"
        advice = "use a checkpoint whose experts have a multiple of 32 inputs and a multiple of 8 outputs"
        raise refuse(sizes, advice)
    return into // MXFP4.group_size, out // MXFP4.per_word


def _require(part: str, stored: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> None:
    if stored.dtype is not dtype or stored.shape != shape:
        asked = f"{str(dtype).removeprefix('torch.')} {shape}"
        what = f"{part} of experts in MXFP4 with {stored.dtype} {tuple(stored.shape)} instead of {asked}"
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


class FusedMoELimitedMxfp4:
    """DeepSeek-V4's experts, computed on packed weights."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def forward(self, hidden_states: Tensor, weights: Tensor, ids: Tensor, *parts: Tensor) -> Tensor:
        """Return a tensor of hidden_states' shape [tokens, hidden].

        parts: weights and scales of gate_up, then weights and scales of down.
        """
        return ops.fused_moe_limited_mxfp4(hidden_states, *parts, weights, ids, self.limit)


def limited_mxfp4_experts(hidden: int, inner: int, experts: int, limit: float, device: Any) -> PackedExperts:
    """Return the layer of DeepSeek-V4's experts. limit: of gate and up."""
    gate_up = LimitedMxfp4Weights(experts, hidden, (inner, inner), device)
    down = LimitedMxfp4Weights(experts, inner, (hidden,), device)
    return PackedExperts(FusedMoELimitedMxfp4(limit), gate_up, down)
