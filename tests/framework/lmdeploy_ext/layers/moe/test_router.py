"""Routing with a correction bias: transformers' router of DeepSeek-V3 is the oracle.

It has no softmax and no ``router_n_groups``. For those the oracle is LMDeploy's default, with biases that are positive.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmdeploy.pytorch.backends.default.moe_router import DefaultRouterNoauxTCImpl
from lmdeploy.pytorch.backends.moe_router import RouterNoauxTCBuildSpec
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaTopkRouter

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.layers.moe.router import BiasedRouter


def by_expert(weights: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """[tokens, experts]: the order in which experts are chosen says nothing."""
    return torch.zeros(len(ids), experts).scatter(1, ids, weights.float())


def transformers_router(kind: Any, top_k: int, n_group: int, kept: int, renormalize: bool, bias: Any) -> Any:
    """Return a router of transformers whose inputs are the logits of 32 experts."""
    config = DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=32,
        num_experts_per_tok=top_k,
        n_group=n_group,
        topk_group=kept,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    router = kind(config)
    router.weight.data, router.e_score_correction_bias = torch.eye(32), bias
    return router


@given(
    kind=st.sampled_from([DeepseekV3TopkRouter, DeepseekV32TopkRouter, GlmMoeDsaTopkRouter]),
    tokens=st.integers(1, 9),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 3)]),
    top_k=st.integers(1, 6),
    renormalize=st.booleans(),
    lowest=st.sampled_from([0.0, -0.5, -1.0, -2.0]),
    seed=st.integers(0, 2**31),
)
def test_it_chooses_what_transformers_does(kind, tokens, groups, top_k, renormalize, lowest, seed) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits, bias = torch.randn(tokens, 32, generator=draw), torch.rand(32, generator=draw) + lowest
    n_group, kept = groups
    spec = RouterNoauxTCBuildSpec("sigmoid", top_k, n_group, kept, 32, 2.5, renormalize)
    _, weights, ids = transformers_router(kind, top_k, n_group, kept, renormalize, bias)(logits)
    got = by_expert(*BiasedRouter(spec).forward(logits, bias), 32)
    torch.testing.assert_close(got, by_expert(weights, ids, 32))


def test_an_expert_of_another_group_never_wins_over_a_negative_choice() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.2, -0.9, -0.8, -0.8])  # the first group is the best
    _, ids = BiasedRouter(RouterNoauxTCBuildSpec("sigmoid", 2, 2, 1, 4, 1.0)).forward(logits, bias)
    assert sorted(ids[0].tolist()) == [0, 1]


@given(
    tokens=st.integers(1, 9),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 3)]),
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    top_k=st.integers(1, 6),
    renormalize=st.booleans(),
    inside=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_it_chooses_what_lmdeploys_default_does(
    tokens, groups, scoring, top_k, renormalize, inside, seed
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits, bias = torch.randn(tokens, 32, generator=draw), torch.rand(32, generator=draw)
    n_group, kept = groups
    router_n_groups = 2 if inside else -1
    top_k = 2 * top_k if inside else top_k
    spec = RouterNoauxTCBuildSpec(scoring, top_k, n_group, kept, 32, 2.5, renormalize, router_n_groups)
    default = DefaultRouterNoauxTCImpl(scoring, top_k, n_group, kept, 32, 2.5, renormalize, router_n_groups)
    given_, kept_logits = (logits, bias), logits.clone()
    got, want = BiasedRouter(spec).forward(*given_), default.forward(*given_)
    torch.testing.assert_close(by_expert(*got, 32), by_expert(*want, 32))
    assert torch.equal(logits, kept_logits)


def test_no_tokens() -> None:
    spec = RouterNoauxTCBuildSpec("sigmoid", 4, 4, 2, 32, 1.0)
    weights, ids = BiasedRouter(spec).forward(torch.zeros(0, 32), torch.zeros(32))
    assert weights.shape == ids.shape == (0, 4)


def test_other_scores_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="sqrtsoftplus"):
        BiasedRouter(RouterNoauxTCBuildSpec("sqrtsoftplus", 4, 1, 1, 32, 1.0))
