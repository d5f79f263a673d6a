"""Choose experts with a correction bias, as DeepSeek-V3 does (arXiv:2412.19437, section 2.1.2).

LMDeploy's own router has two faults. It masks the experts of other groups with 0, so they win over an expert whose
score plus bias is negative; transformers masks them with -inf. It also reshapes with a size of -1, which a graph with a
symbolic number of tokens cannot infer if all experts form one group (``n_group=1``).
"""

from typing import Any

import torch
from lmdeploy.pytorch.backends.moe_router import RouterNoauxTCImpl
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.from_spec import FromSpec


class BiasedRouter(FromSpec, RouterNoauxTCImpl):
    """Chooses experts by score plus bias, and returns their scores as weights.

    With ``n_group`` above 1, keeps the groups whose two best experts have the largest sums. Experts of other groups
    cannot be chosen. With ``router_n_groups`` the weights include the bias. Raises UnsupportedFeatureError for scores
    other than sigmoid and softmax.
    """

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        if spec.scoring_func not in ("sigmoid", "softmax"):
            raise refuse(f"a router with scoring function {spec.scoring_func!r}", "use another model")

    def forward(self, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return (weights, experts), both [tokens, top_k]. logits: [tokens, experts]. bias: [experts]."""
        spec, by_sigmoid = self.spec, self.spec.scoring_func == "sigmoid"
        scores = logits.sigmoid() if by_sigmoid else logits.softmax(-1, dtype=torch.float32)
        choice = scores + bias
        if spec.router_n_groups > 0:  # equally many of each group, and weights include the bias
            size = choice.shape[-1] // spec.router_n_groups
            groups = choice.unflatten(-1, (spec.router_n_groups, size))
            weights, places = groups.topk(spec.top_k // spec.router_n_groups, dim=-1)
            first = torch.arange(spec.router_n_groups, device=choice.device)[:, None] * size
            weights, ids = weights.flatten(-2), (places + first).flatten(-2)
        else:
            if spec.n_group > 1:
                groups = choice.unflatten(-1, (spec.n_group, choice.shape[-1] // spec.n_group))
                sums = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(dim=-1)
                best = sums.topk(spec.top_k_group, dim=-1, sorted=False).indices
                outside = torch.ones_like(sums, dtype=torch.bool).scatter(1, best, False)
                choice = groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)
            ids = choice.topk(spec.top_k, dim=-1, sorted=False).indices
            weights = scores.gather(1, ids)
        if spec.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * spec.routed_scaling_factor, ids
