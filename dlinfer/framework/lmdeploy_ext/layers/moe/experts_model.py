"""Patches on LMDeploy's classes of models with experts, for the layer in ``experts.py``.

This file is imported before LMDeploy's modules, so it imports none of them at its top level.
"""

from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.patching import Original, replaces

# LMDeploy's GPT-OSS has these as constants.
_GPT_OSS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def check(config: Any) -> None:
    """Raise UnsupportedFeatureError for a GPT-OSS whose activation has other constants than LMDeploy's class."""
    if getattr(config, "model_type", "") != "gpt_oss":
        return
    for name, value in _GPT_OSS.items():
        stored = getattr(config, name, value)
        if stored != value:
            raise refuse(f"{name}={stored} of GPT-OSS", f"use a model with {name}={value}")


@replaces(
    "lmdeploy.pytorch.models.gpt_oss:GptOssForCausalLM._load_weight_experts",
    why="moves the weights of all experts to CUDA before it splits them",
    when=activation.is_on,
    for_models=("gpt_oss",),
)
def _load_gpt_oss_experts(
    original: Original, self: Any, name: str, loaded_weight: Tensor, params_dict: dict[str, Any]
) -> None:
    """Load one tensor of a checkpoint: weights [experts, in, out] or biases [experts, out] of all experts.

    In gate_up, columns of gate and of up alternate. Tensors of MXFP4 (blocks, scales) go to our layer unchanged.
    """
    from lmdeploy.pytorch.weight_loader.model_weight_loader import load_weight

    part = "gate_up" if "gate_up" in name else "down"
    owner, _, stored = name.rpartition(f".{part}_proj")
    kind = stored.removeprefix("_") or "weight"
    param = params_dict[f"{owner}.experts.{part}.{kind}"]
    if kind in ("blocks", "scales"):
        load_weight(param, loaded_weight)
        return
    rows = loaded_weight.transpose(1, 2) if kind == "weight" else loaded_weight
    for expert, own in enumerate(rows):
        shards = {"gate": own[::2], "up": own[1::2]} if part == "gate_up" else {"down": own}
        for shard, values in shards.items():
            load_weight(param, values, expert_id=expert, shard_id=shard)


class SigmoidRouter:
    """Chooses each token's ``topk`` experts, within the best groups of experts, by sigmoid score plus a correction.

    The correction affects only the choice; the returned weights are the scores. The caller renormalises and scales the
    weights. Source: DeepSeek-V3 (2024, arXiv:2412.19437), section 2.1.2, as transformers' Glm4MoeTopkRouter computes
    it.
    """

    def __init__(self, gate: Any, topk: int, groups: int, topk_groups: int) -> None:
        self.gate, self.topk, self.groups, self.topk_groups = gate, topk, groups, topk_groups

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 weights [N, topk] and int64 ids [N, topk] for router_logits, float32 [N, experts]."""
        scores = router_logits.sigmoid()
        choice = scores + self.gate.e_score_correction_bias
        if self.topk_groups < self.groups:
            grouped = choice.unflatten(-1, (self.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_groups, dim=-1).indices
            outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            choice = grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)
        ids = choice.topk(self.topk, dim=-1).indices
        return scores.gather(-1, ids), ids


@replaces(
    "lmdeploy.pytorch.models.glm4_moe:Glm4MoE.__init__",
    why="routes by a softmax, and ignores the correction and the groups, though the model routes by sigmoids",
    when=activation.is_on,
    for_models=("glm4_moe",),
)
def _glm4_moe(
    original: Original, self: Any, config: Any, layer_idx: int, dtype: Any = None, device: Any = None
) -> None:
    original(self, config, layer_idx, dtype, device)
    del self.softmax_topk
    self.softmax_topk = SigmoidRouter(self.gate, self.top_k, config.n_group, config.topk_group)
