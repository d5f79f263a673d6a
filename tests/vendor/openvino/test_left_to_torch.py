"""What OpenVINO does not compile after all is left to torch, under the fallback policy and with OpenVINO's reason."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dlinfer.errors import GraphFallbackError, GraphRunError
from dlinfer.graph.torch_private.dynamo import mark_unbacked
from dlinfer.vendor.openvino import lowered as openvino_model
from tests.graph.compiling import compiled
from tests.vendor.openvino.lowering import lowered


def test_a_model_that_is_not_compiled(monkeypatch):
    class Failing:
        def compile_model(self, *args: Any) -> None:
            raise RuntimeError("Check 'made for a test' failed")

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.randn(3, 4)
    monkeypatch.setattr(openvino_model, "core", Failing)
    compiled, report = lowered(doubled, x, fallback="allow")
    assert "OpenVINO cannot compile the region" in str(report.refusals()) + str(report.to_dict())
    assert torch.equal(compiled(x)[0], doubled(x))
    with pytest.raises(GraphFallbackError, match=r"OpenVINO cannot compile the region.*made for a test"):
        lowered(doubled, x)


def test_extremes_of_scattered_floats_that_leave_self_out():
    """The plugin gives the largest finite number in place of an infinity."""

    def extremes(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(1, index, x, "amin", include_self=False)

    x, index = torch.full((2, 3), float("inf")), torch.tensor([[0, 0, 2], [1, 1, 1]])
    compiled, report = lowered(extremes, x, index, fallback="allow")
    assert "an extreme of scattered floats without self" in str(report.to_dict())
    assert torch.equal(compiled(x, index)[0], extremes(x, index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_keys_that_attention_repeats_for_the_queries_heads(dtype):
    """The plugin takes the queries' length for their heads where they are equal, in 16 bits."""

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v)

    q, k, v = torch.randn(1, 4, 4, 16), torch.randn(1, 1, 5, 16), torch.randn(1, 1, 5, 16)
    given = [one.to(dtype) for one in (q, k, v)]
    compiled, report = lowered(attention, *given, fixed=(4, 16, 5), fallback="allow")
    assert "are repeated" in str(report.to_dict())
    torch.testing.assert_close(compiled(*given)[0], attention(*given))


def test_extremes_of_nothing_whatever_comes():
    """The plugin ends the process over such a constant; the fake function of ``min`` does not raise."""
    with pytest.raises(GraphFallbackError, match="without elements"):
        lowered(lambda x: (x.abs() ** x).min(0)[1], torch.empty(0, 5), fixed=(0, 5))


def test_products_over_nothing():
    """With weights the plugin gives what lay in its memory."""
    product = torch.nn.Linear(0, 3)
    compiled, _ = lowered(lambda x: product(x * 2), torch.empty(2, 0), fixed=(0,), fallback="allow")
    assert torch.equal(compiled(torch.empty(2, 0))[0], product.bias.expand(2, 3))
    with pytest.raises(GraphFallbackError, match="without elements"):
        lowered(lambda x: x @ torch.ones(0, 3), torch.empty(2, 0), fixed=(0,))


def test_the_largest_of_bools():
    x = torch.randn(3, 4)
    compiled, _ = lowered(lambda x: (x > 0).max(1)[0], x)
    assert torch.equal(compiled(x)[0], (x > 0).max(1)[0])


def test_weights_without_elements():
    """They are built in at the first call, so that it is a call that is left to torch."""
    rows = torch.nn.Parameter(torch.empty(0, 3), requires_grad=False)

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("rows", rows)

        def forward(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.linear(rows, weight, bias)

    options: dict[str, Any] = {"engine": "openvino", "fallback": "allow", "small_regions": "engine"}
    run = torch.compile(Product(), backend="dlinfer", options=options)
    with torch.no_grad():
        assert run(torch.randn(1, 3), torch.tensor(1.0)).shape == (0, 1)


@pytest.mark.parametrize("extreme", [lambda x: x.max(0)[0], lambda x: x.min(-1)[1], torch.max])
@pytest.mark.usefixtures("graph_mode")
def test_extremes_of_nothing(extreme):
    """torch raises; OpenVINO would give what lay in its memory."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"engine": "openvino", "small_regions": "engine", "fallback": "allow"}
    run = torch.compile(lambda x: extreme(x) * 2, backend="dlinfer", options=options)
    x = torch.randn(5)
    mark_unbacked(x, 0, "rows")
    torch.testing.assert_close(run(x), extreme(x) * 2)
    empty = torch.empty(0)
    mark_unbacked(empty, 0, "rows")
    with pytest.raises(GraphRunError, match=r"non-zero size|non-zero numel|numel"):
        run(empty)


def test_a_size_that_is_always_0_beside_one_that_varies():
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(-3).sign()

    x = torch.empty(3, 1, 0, 2)
    torch._dynamo.mark_dynamic(x, 0)
    run = compiled(function, engine="openvino", fallback="allow", small_regions="engine")
    assert run(x).shape == function(x).shape


@pytest.mark.usefixtures("graph_mode")
def test_a_wrong_index_of_a_table_without_columns():
    """Its result has no elements, yet torch looks at the indices."""
    options: dict[str, Any] = {"engine": "openvino", "small_regions": "engine", "fallback": "allow"}
    run = torch.compile(lambda weight, rows: F.embedding(rows, weight), backend="dlinfer", options=options)
    assert run(torch.empty(3, 0), torch.tensor([2, 0])).shape == (2, 0)
    with pytest.raises(RuntimeError, match="out of DATA bounds"):
        run(torch.empty(3, 0), torch.tensor([3, 0]))
