"""Routing with a correction bias: LMDeploy's default on the CPU is the oracle where it works."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmdeploy.pytorch.backends.default.moe_router import DefaultRouterNoauxTCImpl
from lmdeploy.pytorch.backends.moe_router import RouterNoauxTCBuildSpec

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.layers.moe.router import BiasedRouter


def by_expert(weights: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """[tokens, experts]: the order in which experts are chosen says nothing."""
    return torch.zeros(len(ids), experts).scatter(1, ids, weights.float())


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
