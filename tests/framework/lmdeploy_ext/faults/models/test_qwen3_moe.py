"""Experts of Qwen3-VL-MoE in both layouts that checkpoints have, and layers without experts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import qwen3_moe

EXPERTS, HIDDEN, INNER = 3, 8, 6


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_active", "cpu")


class Experts(nn.Module):
    """Parameters as LMDeploy's layer of experts has them: [experts, out, in]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.full((EXPERTS, 2 * INNER, HIDDEN), torch.nan), requires_grad=False)
        self.down = nn.Parameter(torch.full((EXPERTS, HIDDEN, INNER), torch.nan), requires_grad=False)
        for parameter in (self.gate_up, self.down):
            parameter.weight_loader = self.load  # pyright: ignore[reportAttributeAccessIssue]

    def load(self, param: nn.Parameter, weight: Tensor, expert_id: int, shard_id: str) -> None:
        begin = INNER if shard_id == "up" else 0
        param.data[expert_id, begin : begin + len(weight)] = weight


@pytest.mark.parametrize("released", [True, False])
def test_experts_are_loaded_from_either_layout(released: bool) -> None:
    from lmdeploy.pytorch.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration as Model

    load = qwen3_moe._either_layout.build(Model._load_weight_fused_experts)
    config = SimpleNamespace(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    model = SimpleNamespace(config=SimpleNamespace(text_config=config))
    experts = Experts()
    parameters = {"m.experts.gate_up.weight": experts.gate_up, "m.experts.down.weight": experts.down}
    names = [
        (".experts.gate_up.weight", ".experts.gate_up_proj"),
        (".experts.down.weight", ".experts.down_proj"),
    ]
    expected = {
        "gate_up": torch.randn(EXPERTS, 2 * INNER, HIDDEN),
        "down": torch.randn(EXPERTS, HIDDEN, INNER),
    }
    for name, weight in expected.items():
        stored = weight.transpose(1, 2).contiguous() if released else weight
        load(model, f"m.experts.{name}_proj", stored, parameters, names)
    torch.testing.assert_close(experts.gate_up.data, expected["gate_up"], rtol=0, atol=0)
    torch.testing.assert_close(experts.down.data, expected["down"], rtol=0, atol=0)


def test_a_layer_without_experts_takes_what_every_layer_passes() -> None:
    def original(self: Any, x: Tensor) -> Tensor:
        return x + 1

    forward = qwen3_moe._without_routed_experts.build(original)
    assert forward(None, torch.tensor(1), all_routed_experts=None) == 2
