"""Bool masks of attention become additive once a graph, with the numbers that attention itself would have made."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from dlinfer.graph.ir.dialect import op_name
from dlinfer.vendor.cpu.inductor.masks import share_additive_masks
from tests.graph.compiling import (
    compiled,
    interpreted_engine,
    last_report,
    same_as_eager,
    use_engine,
)
from tests.graph.passes.fusion.capturing import captured

QUERY = torch.arange(96.0).view(1, 2, 6, 8).sin()
CAUSAL = torch.ones(1, 1, 6, 6).tril() > 0


def calls(function, *args) -> str:
    """The graph after the rewrite, a call a line."""
    graph_module = captured(function, *args, dynamic=False).graph_module
    share_additive_masks(graph_module)
    graph_module.graph.lint()
    names: dict[Any, str] = {}
    lines = []
    for node in graph_module.graph.nodes:
        names[node] = f"v{len(names)}"
        if node.op == "call_function":
            arguments = [names.get(one, one) for one in (*node.args, *node.kwargs.values())]
            lines.append(f"{names[node]} = {op_name(node)}({', '.join(map(str, arguments))})")
    return "\n".join(lines)


def two_layers(q, mask):
    mask = mask & (mask.sum(-1, keepdim=True) > 1)  # a first row with no key at all
    first = F.scaled_dot_product_attention(q, q, q, mask)
    return F.scaled_dot_product_attention(first, q, q, mask)


def test_one_for_all_layers():
    assert_expected_inline(
        calls(two_layers, QUERY, CAUSAL),
        """\
v2 = aten.sum.dim_IntList(v0, [-1], True)
v3 = aten.gt.Scalar(v2, 1)
v4 = aten.__and__.Tensor(v0, v3)
v5 = aten.logical_not(v4)
v6 = aten.zeros_like(v4, torch.float32)
v7 = aten.masked_fill.Scalar(v6, v5, -inf)
v8 = aten.scaled_dot_product_attention(v1, v1, v1, v7)
v9 = aten.scaled_dot_product_attention(v8, v1, v1, v7)""",
    )


def unshared(q, mask):
    return F.scaled_dot_product_attention(q, q, q, mask)


def additive_already(q, mask):
    bias = torch.where(mask, 0.0, -1.0)
    return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, q, q, bias), q, q, bias)


def written_between(q, mask):
    mask = mask.clone()
    first = F.scaled_dot_product_attention(q, q, q, mask)
    mask.view(-1)[1] = True
    return F.scaled_dot_product_attention(first, q, q, mask)


def expanded(q, mask):
    mask = mask.expand(1, 2, 6, 6)
    return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, q, q, mask), q, q, mask)


@pytest.mark.parametrize("function", [unshared, additive_already, written_between, expanded])
def test_masks_that_stay(function):
    assert "logical_not" not in calls(function, QUERY, CAUSAL)


@pytest.mark.slow
@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("function", [two_layers, unshared, written_between, expanded])
def test_numbers(function):
    same_as_eager(function, QUERY, CAUSAL, small_regions="engine")
    assert all(node.place != "eager" for node in last_report().nodes)


@pytest.mark.slow
@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("function", [two_layers, unshared, written_between, expanded])
def test_numbers_of_bfloat16(function):
    """Near float64's: kernels, torch's own among them, differ in whether probabilities are rounded.

    Two layers' probabilities and results are each rounded by at most half a unit of 2**-8, and are averages of numbers
    up to 1.
    """
    query = QUERY.bfloat16()
    result = compiled(function, small_regions="engine")(query, CAUSAL)
    assert all(node.place != "eager" for node in last_report().nodes)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), function(query.double(), CAUSAL), rtol=0, atol=4 * 2**-9)


@pytest.mark.usefixtures("graph_mode")
def test_it_is_a_pass_that_is_verified_reported_and_left_out_on_demand(monkeypatch):
    use_engine(monkeypatch, interpreted_engine(monkeypatch))
    for options, names in (
        ({}, ["inductor.shared_masks"]),
        ({"passes": {"inductor.shared_masks": False}}, []),
    ):
        same_as_eager(two_layers, QUERY, CAUSAL, calls=1, **options)
        found = [one for one in last_report().passes if one.name.startswith("inductor.")]
        assert [one.name for one in found] == names
        assert all(len(one.edits) == 1 and len(one.edits[0].added) == 3 for one in found)
        torch._dynamo.reset()


def test_a_mask_that_is_passed_in_beside_caches_that_are_written():
    """Numbers of other widths are no memory of bools: a write to a cache is none to the mask."""

    def with_a_cache(q, mask, cache):
        first = F.scaled_dot_product_attention(q, q, q, mask)
        cache.add_(1)
        return F.scaled_dot_product_attention(first, q, q, mask)

    assert "logical_not" in calls(with_a_cache, QUERY, CAUSAL, torch.ones(4))
    assert "logical_not" not in calls(with_a_cache, QUERY, CAUSAL, torch.ones(4, dtype=torch.uint8))
