"""MiniCPM3: LMDeploy's classes with their faults corrected."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import minicpm3
from tests.framework.lmdeploy_ext.faults.models.rope_configs import MINICPM3, SIZES, made_by


@pytest.fixture(autouse=True)
def on_our_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_active", "cpu")


def test_attention_of_minicpm3_knows_the_sizes_of_its_heads() -> None:
    attention = SimpleNamespace(impl=SimpleNamespace(head_size=40, v_head_size=40))
    made_by(minicpm3._head_sizes, None, attn_fwd=attention, q_head_dim=24)
    assert vars(attention.impl) == {"head_size": 24, "v_head_size": 24}


def test_minicpm3_makes_logits_of_the_tokens_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(hidden_size=8, dim_model_base=2)
    head = nn.Linear(8, 5, bias=False)
    made = made_by(minicpm3._with_logits, config, None, config=config, lm_head=head)
    made.model = lambda ids, *rest: torch.ones(1, ids.shape[1], 8)
    forward = minicpm3._hidden_states.build(lambda *_, **__: torch.zeros(1))
    step: Any = (torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3), [])
    hidden = forward(made, *step, inputs_embeds=None)
    assert hidden.shape == (1, 3, 8)
    torch.testing.assert_close(made.get_logits(hidden[:, -1:]), head(torch.full((1, 1, 8), 0.25)))
    monkeypatch.setattr(activation, "_active", None)
    assert forward(made, *step).shape == (1,)
    assert not hasattr(made_by(minicpm3._with_logits, config, None), "get_logits")


@pytest.mark.parametrize("made", MINICPM3.values())
def test_what_is_computed_alike_is_served(made: Any) -> None:
    minicpm3.check(made())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"v_head_dim": 16}, "v_head_dim=16 instead of 8"),
        ({"q_lora_rank": None}, "q_lora_rank=None"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 0.7}}, "mscale_all_dim"),
    ],
    ids=str,
)
def test_what_is_computed_otherwise_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    config = SimpleNamespace(**{"model_type": "minicpm3", "q_lora_rank": 24, **SIZES} | fields)
    with pytest.raises(UnsupportedFeatureError, match=named):
        minicpm3.check(config)
