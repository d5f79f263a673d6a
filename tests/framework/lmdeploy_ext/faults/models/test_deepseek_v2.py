"""DeepSeek-V2's router chooses and weighs experts as transformers' does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.models import deepseek_v2 as lmdeploy_model
from torch import Tensor, nn
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import deepseek_v2

HIDDEN, EXPERTS = 32, 16


class Softmax(nn.Module):
    """LMDeploy's ``SoftmaxTopK``, without a backend."""

    def __init__(self, top_k: int, n_groups: int = -1) -> None:
        super().__init__()
        self.top_k = top_k

    def forward(self, logits: Tensor) -> Any:
        return logits.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)


class Gemm(nn.Module):
    """LMDeploy's ``RouterGemm``, without a backend."""

    def __init__(self, out_dtype: torch.dtype | None = None) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor, weight: Tensor) -> Tensor:
        return hidden_states @ weight.T


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_active", "cpu")
    monkeypatch.setattr(lmdeploy_model, "SoftmaxTopK", Softmax)
    monkeypatch.setattr(lmdeploy_model, "RouterGemm", Gemm)


def by_expert(weights: Tensor, ids: Tensor) -> Tensor:
    """Return [tokens, experts], because the order of the chosen experts does not matter."""
    return torch.zeros(len(ids), EXPERTS).scatter(1, ids, weights.float())


def original_init() -> Any:
    """Return LMDeploy's own ``MoEGate.__init__``, also if it is patched in this process."""
    init = lmdeploy_model.MoEGate.__init__
    return getattr(init, "__wrapped__", init)


def routers(config: DeepseekV2Config) -> tuple[Any, DeepseekV2TopkRouter]:
    """Return LMDeploy's corrected router and transformers' router, with the same weight."""
    gate: Any = lmdeploy_model.MoEGate.__new__(lmdeploy_model.MoEGate)
    deepseek_v2._router.build(original_init())(gate, config, torch.float32, "cpu")
    oracle = DeepseekV2TopkRouter(config)
    weight = torch.randn(EXPERTS, HIDDEN) - 0.2
    gate.weight.data, oracle.weight.data = weight, weight
    return gate, oracle


def config_of(method: str, norm: bool, groups: int, kept: int, top_k: int, scale: float) -> DeepseekV2Config:
    scoring: dict[str, Any] = {"scoring_func": "softmax"}  # transformers has no such field
    return DeepseekV2Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=top_k,
        topk_method=method,
        norm_topk_prob=norm,
        n_group=groups,
        topk_group=kept,
        routed_scaling_factor=scale,
        **scoring,
    )


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("method", "groups", "kept", "top_k"),
    [
        ("greedy", 1, 1, 4),
        ("greedy", 4, 2, 1),
        ("group_limited_greedy", 1, 1, 3),
        ("group_limited_greedy", 4, 2, 3),
        ("group_limited_greedy", 4, 1, 1),
        ("group_limited_greedy", 8, 3, 6),
    ],
)
def test_routes_as_transformers(
    method: str, groups: int, kept: int, top_k: int, norm: bool, graph: bool
) -> None:
    torch.manual_seed(0)
    gate, oracle = routers(config_of(method, norm, groups, kept, top_k, scale=4.0))
    forward = gate
    if graph:
        torch._dynamo.reset()  # else too many recompilations of the same code
        forward = torch.compile(gate, backend="eager", fullgraph=True, dynamic=True)
    for shift in (-3.0, 0.0, 3.0):  # all logits negative, of both signs, all positive
        x = torch.randn(9, HIDDEN) + shift
        _, weights, ids = oracle(x)
        if norm and top_k > 1:  # transformers ignores this field; LMDeploy renormalises and does not scale
            weights = weights / weights.sum(-1, keepdim=True)
        torch.testing.assert_close(by_expert(*forward(x)), by_expert(weights, ids))


def test_v3s_router_is_left_as_it_is() -> None:
    def original(self: Any, *arguments: Any) -> None:
        self.topk_method, self.softmax_topk = "noaux_tc", "its own"

    gate = SimpleNamespace()
    deepseek_v2._router.build(original)(gate, None)
    assert (gate.topk_method, gate.softmax_topk) == ("noaux_tc", "its own")
