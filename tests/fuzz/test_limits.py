"""Nothing is forgiven that the documentation does not say."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.fuzz.limits import LIMITS, Documented, documented, undocumented

INF, NAN = float("inf"), float("nan")


def test_each_limit_is_a_line_of_the_docs():
    pages = Path(__file__).parents[2] / "docs" / "vendors"
    docs = "\n".join((pages / f"{name}.md").read_text() for name in ("cpu", "onnxruntime", "openvino"))
    assert undocumented(docs) == []


def test_all_combinations_are_tried():
    assert len(list(documented("openvino"))) == 15
    assert len(list(documented("onnxruntime"))) == 7
    assert len(list(documented("inductor"))) == 3


@pytest.mark.parametrize("function", [torch.exp, torch.Tensor.exp, torch.Tensor.exp_, torch.expm1])
def test_exponentials_overflow_where_the_docs_say(function):
    x = torch.tensor([1.0, 88.3, 88.5, NAN])
    with Documented(LIMITS):
        found = function(x.clone())
    torch.testing.assert_close(
        found[[0, 1, 3]], function(x.clone())[[0, 1, 3]], equal_nan=True, rtol=0, atol=0
    )
    assert found[2] == INF and function(x.clone())[2] < INF


def test_choices_give_positive_zeros():
    zeros, where = torch.tensor([-0.0, 1.0]), torch.tensor([True, True])
    with Documented(LIMITS):
        found = (
            torch.where(where, zeros, 1.0),
            zeros.masked_fill(~where, 1.0),
            zeros.clone().masked_fill_(~where, 1.0),
        )
    assert not any(one.signbit().any() for one in found)
    assert torch.where(where, zeros, 1.0).signbit()[0], "torch keeps the sign"


def _attention(key: float, mask: torch.Tensor | None = None, **more: bool) -> torch.Tensor:
    query, value = torch.ones(1, 2, 2, 4), torch.ones(1, 1, 2, 4)
    keys = torch.full((1, 1, 2, 4), key)
    with Documented(LIMITS):
        return F.scaled_dot_product_attention(query, keys, value, mask, enable_gqa=True, **more)


OF_INDUCTOR = tuple(limit for limit in LIMITS if limit.engine == "inductor")


def test_a_key_that_the_mask_hides_counts_for_nothing():
    query, keys, value = torch.ones(1, 2, 4, 4), torch.ones(1, 1, 3, 4), torch.rand(1, 1, 3, 4)
    keys[:, :, 0], value[:, :, 1] = NAN, INF
    shown = torch.tensor([[0, 1, 1], [0, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    for mask in (shown, torch.zeros(4, 3).masked_fill(~shown, -INF)):
        with Documented(OF_INDUCTOR):
            result = F.scaled_dot_product_attention(query, keys, value, mask, enable_gqa=True)
        assert (
            (result[0, :, 0] == INF).all() and (result[0, :, 2] == 0).all() and result[0, :, 3].isnan().all()
        )
        torch.testing.assert_close(result[0, :, 1], value[0, 0, 2].expand(2, 4))


def test_a_nan_score_makes_a_query_nan():
    query, keys, value = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
    keys[:, :, 0], keys[:, :, 1:] = NAN, -INF
    with Documented(OF_INDUCTOR):
        result = F.scaled_dot_product_attention(query, keys, value)
        infinite = F.scaled_dot_product_attention(query, -INF * value, value)
    assert result.isnan().all() and (infinite == 0).all()
    assert (F.scaled_dot_product_attention(query, keys, value) == 0).all()


def test_a_query_without_a_score_is_nan():
    assert _attention(-INF).isnan().all() and _attention(NAN).isnan().all()
    assert (_attention(1.0) == 1).all()


@pytest.mark.parametrize("key", [INF, NAN])
def test_a_key_that_causality_hides_makes_nan(key):
    ones, keys = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4)
    keys[..., 1, 0] = key
    with Documented(tuple(limit for limit in LIMITS if limit.engine == "openvino")):
        found = F.scaled_dot_product_attention(ones, keys, ones, is_causal=True)
    assert found[..., 0, :].isnan().all()
    plain = F.scaled_dot_product_attention(ones, keys, ones, is_causal=True)
    assert (plain[..., 0, :] == 1).all(), "torch passes over it"


@pytest.mark.parametrize("mask", [torch.tensor([[True], [False]]), torch.tensor([[0.0], [-INF]])])
def test_a_query_without_a_key_is_0(mask):
    found = _attention(NAN, mask.expand(2, 2))
    assert found[..., 0, :].isnan().all() and (found[..., 1, :] == 0).all()
    assert _attention(NAN, is_causal=True).isnan().all()
