"""Correct DeepSeek-V2's router for experts of the best groups only.

Source: DeepSeek-V2 (2024, arXiv:2405.04434), section 2.2.2, as transformers' DeepseekV2TopkRouter computes it. With
``norm_topk_prob`` the weights stay as LMDeploy has them, renormalised and not scaled. transformers ignores this field.
"""

from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


class GroupLimitedTopK:
    """Chooses each token's ``top_k`` experts by softmax, all of them from the ``topk_group`` best groups.

    The softmax is over all experts. A group is as good as its best expert.
    """

    def __init__(self, top_k: int, groups: int, topk_group: int) -> None:
        self.top_k, self.groups, self.topk_group = top_k, groups, topk_group

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 weights [N, top_k] and int64 ids [N, top_k] for router_logits [N, experts]."""
        scores = router_logits.softmax(-1, dtype=torch.float32)
        grouped = scores.unflatten(-1, (self.groups, scores.shape[-1] // self.groups))
        best = grouped.amax(-1).topk(self.topk_group, dim=-1, sorted=False).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        weights, ids = grouped.masked_fill(outside[..., None], 0.0).flatten(-2).topk(self.top_k, dim=-1)
        return weights, ids


@corrects(
    "lmdeploy.pytorch.models.deepseek_v2:MoEGate.__init__",
    why="with topk_method='group_limited_greedy', sets logits of excluded experts to 0 before the softmax, so weights "
    "are wrong, and an excluded expert wins over a negative logit",
    for_models=("deepseek_v2",),
)
def _router(
    original: Original, self: Any, config: Any, dtype: Any = None, device: Any = None, info: Any = None
) -> None:
    original(self, config, dtype, device, info)
    if self.topk_method == "group_limited_greedy":
        self.topk_method = "greedy"  # ``forward`` then passes logits of all experts to ``softmax_topk``
        del self.softmax_topk
        self.softmax_topk = GroupLimitedTopK(self.top_k, self.n_group, self.topk_group)
