"""Phi-3.5-MoE: LMDeploy's classes with their faults corrected."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.models import phi3_moe
from torch import nn
from transformers.models.phimoe import modeling_phimoe

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import phimoe
from tests.framework.lmdeploy_ext.faults.models.rope_configs import PHIMOE, SCALES, SIZES, made_by


@pytest.fixture(autouse=True)
def on_our_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_active", "cpu")


@pytest.mark.parametrize("epsilon", [0.01, 0.2])
def test_lmdeploy_chooses_and_weighs_experts_as_transformers_does_when_it_does_not_train(
    epsilon: float,
) -> None:
    torch.manual_seed(0)
    scores = torch.randn(200, 8)
    ours = phi3_moe.sparsemixer(scores, top_k=2, jitter_eps=epsilon)
    torch.testing.assert_close(ours, modeling_phimoe.sparsemixer(scores, epsilon, training=False))


def test_experts_get_their_input_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = (phimoe._without_jitter, None)
    assert made_by(*given, input_jitter_noise=0.01).input_jitter_noise == 0
    monkeypatch.setattr(activation, "_active", None)
    assert made_by(*given, input_jitter_noise=0.01).input_jitter_noise == 0.01


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_of_phimoe_is_the_embeddings(tied: bool) -> None:
    embeddings, head = nn.Embedding(5, 4), nn.Linear(4, 5)
    config = SimpleNamespace(tie_word_embeddings=tied)
    model = SimpleNamespace(embed_tokens=embeddings)
    made_by(phimoe._tied, config, None, model=model, lm_head=head)
    assert (head.weight is embeddings.weight) == tied


@pytest.mark.parametrize("made", PHIMOE.values())
def test_what_is_computed_alike_is_served(made: Any) -> None:
    phimoe.check(made())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_parameters": {"rope_type": "yarn", **SCALES}}, "PhiMoE with rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "longrope", "short_mscale": 1.0}}, "without short_mscale or"),
    ],
    ids=str,
)
def test_what_is_computed_otherwise_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    config = SimpleNamespace(**{"model_type": "phimoe", "q_lora_rank": 24, **SIZES} | fields)
    with pytest.raises(UnsupportedFeatureError, match=named):
        phimoe.check(config)
