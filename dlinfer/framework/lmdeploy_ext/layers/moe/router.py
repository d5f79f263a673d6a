"""Experts chosen with a correction bias, as DeepSeek-V3 does it (arXiv:2412.19437, section 2.1.2).

LMDeploy's default has tensors' sizes inferred, which a graph for any number of tokens cannot do with one group.
"""

from typing import Any

import torch
from lmdeploy.pytorch.backends.moe_router import RouterNoauxTCImpl
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.from_spec import FromSpec

_BEST_OF_A_GROUP = 2
"""A group counts as much as its best experts of so many together."""


class BiasedRouter(FromSpec, RouterNoauxTCImpl):
    """Chooses by score plus bias, and weighs by the score alone. Raises UnsupportedFeatureError for other scores."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        if spec.scoring_func not in ("sigmoid", "softmax"):
            raise refuse(f"a router that scores by {spec.scoring_func!r}", "use another model")

    def forward(self, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """logits [tokens, experts], bias [experts] -> (weights, experts), both [tokens, top_k]; nothing is mutated."""
        spec, by_sigmoid = self.spec, self.spec.scoring_func == "sigmoid"
        scores = logits.sigmoid() if by_sigmoid else logits.softmax(-1, dtype=torch.float32)
        choice = scores + bias
        if spec.router_n_groups > 0:
            weights, ids = _in_each_group(choice, spec.top_k, spec.router_n_groups)
        else:
            if spec.n_group > 1:
                choice = _best_groups(choice, spec.n_group, spec.top_k_group)
            ids = choice.topk(spec.top_k, dim=-1, sorted=False).indices
            weights = scores.gather(1, ids)
        if spec.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * spec.routed_scaling_factor, ids


def _best_groups(choice: Tensor, groups: int, kept: int) -> Tensor:
    """[tokens, experts], with 0 for the experts of all groups but the best."""
    grouped = choice.unflatten(-1, (groups, choice.shape[-1] // groups))
    best = grouped.topk(min(_BEST_OF_A_GROUP, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    chosen = torch.zeros_like(best).scatter(1, best.topk(kept, dim=-1, sorted=False).indices, 1)
    return grouped.masked_fill(chosen[..., None] == 0, 0.0).flatten(-2)


def _in_each_group(choice: Tensor, top_k: int, groups: int) -> tuple[Tensor, Tensor]:
    """The best of each group, equally many: (score plus bias, expert)."""
    size = choice.shape[-1] // groups
    weights, places = choice.unflatten(-1, (groups, size)).topk(top_k // groups, dim=-1)
    first = torch.arange(groups, device=choice.device)[:, None] * size
    return weights.flatten(-2), (places + first).flatten(-2)
