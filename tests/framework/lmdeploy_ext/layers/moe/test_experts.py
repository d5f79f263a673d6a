"""Experts with biases and GPT-OSS's activation: the layer, the loader of its checkpoints, and the tokenizer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.models.gpt_oss import GateupAct
from torch import nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.layers.moe import experts, experts_model

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 16, 24, 5, 2


def of_transformers() -> Any:
    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS)
    made = GptOssExperts(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.7)  # so that some values are cut off
    return made.requires_grad_(False)


class Parts(nn.Module):
    """The parameters of LMDeploy's layer, which record what its loader gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = {
            "gate_up.weight": (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            "gate_up.bias": (EXPERTS, 2 * INTERMEDIATE),
            "down.weight": (EXPERTS, HIDDEN, INTERMEDIATE),
            "down.bias": (EXPERTS, HIDDEN),
        }
        self.params: dict[str, Any] = {}
        for name, shape in self.shapes.items():
            parameter: Any = nn.Parameter(torch.zeros(shape), requires_grad=False)
            parameter.weight_loader = self.load
            self.params[f"model.layers.0.mlp.experts.experts.{name}"] = parameter

    @staticmethod
    def load(param: torch.Tensor, loaded_weight: torch.Tensor, expert_id: int, shard_id: str) -> None:
        half = param.shape[1] // 2
        rows = {"gate": slice(0, half), "up": slice(half, None), "down": slice(None)}[shard_id]
        param.data[expert_id, rows] = loaded_weight


def test_a_checkpoint_of_transformers_computes_what_transformers_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs, parts = of_transformers(), Parts()
    monkeypatch.setattr(experts_model.activation, "_active", "cpu")
    load = experts_model._load_gpt_oss_experts.build(lambda *_: None)
    for name, weight in theirs.state_dict().items():
        load(None, f"model.layers.0.mlp.experts.{name}", weight, parts.params)
    gate_up, gate_up_bias, down, down_bias = parts.params.values()
    x = torch.randn(9, HIDDEN)
    scores, ids = torch.randn(9, EXPERTS).topk(TOPK)
    weights = scores.softmax(-1)
    layer = experts.Experts(TOPK, EXPERTS)
    act: Any = GateupAct.build(7.0, 1.702)
    got = layer.forward(x, weights, ids, gate_up, down, gate_up_bias, down_bias, act_func=act)
    torch.testing.assert_close(got, theirs(x, ids, weights), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("bias", "act", "renormalise"),
    [
        (True, None, False),
        (False, GateupAct(7.0), False),
        (True, torch.relu, False),
        (True, GateupAct(7.0), True),
    ],
    ids=["biases alone", "activation alone", "another activation", "renormalised"],
)
def test_other_kinds_are_refused(bias: bool, act: Any, renormalise: bool) -> None:
    gate_up, gate_up_bias, down, down_bias = Parts().params.values()
    biases = (gate_up_bias, down_bias) if bias else (None, None)
    layer = experts.Experts(TOPK, EXPERTS, renormalise)
    x, ids = torch.randn(3, HIDDEN), torch.zeros(3, TOPK, dtype=torch.int64)
    with pytest.raises(UnsupportedFeatureError, match="experts with biases, or with an activation"):
        layer.forward(x, torch.rand(3, TOPK), ids, gate_up, down, *biases, act_func=act)


def test_constants_that_lmdeploy_would_pass_over_are_refused() -> None:
    experts_model.check(GptOssConfig())
    experts_model.check(SimpleNamespace(model_type="llama", swiglu_limit=3.0))
    for name in ("swiglu_limit", "swiglu_alpha"):
        with pytest.raises(UnsupportedFeatureError, match=f"{name}=3.0"):
            experts_model.check(GptOssConfig.from_dict({name: 3.0}))
