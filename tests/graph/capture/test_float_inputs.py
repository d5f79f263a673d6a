"""Floats that a caller passes: two graphs for all values, as Dynamo makes them, and the results of eager torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlinfer.graph.report import report
from dlinfer.graph.torch_private.dynamo import mark_fixed
from tests.graph.compiling import StubEngine, compiled, use_engine

pytestmark = pytest.mark.usefixtures("graph_mode")

CALLS = {
    "x / t": lambda x, t: x / t,
    "t / x": lambda x, t: t / (x + 9),
    "x - t": lambda x, t: x - t,
    "t - x": lambda x, t: t - x,
    "arithmetic of floats": lambda x, t: x * ((1 - t) * 2 + 1 / t),
    "power": lambda x, t: x.abs() ** t,
    "root of a float": lambda x, t: x * t**0.5,
    "comparison": lambda x, t: torch.where(x > t, x, 0) + (x <= t),
    "in place": lambda x, t: ((x.float() + 1).mul_(t), (x.float() + 1).div_(t)),
    "functions and methods": lambda x, t: torch.mul(x, t) + x.sub(t) - torch.div(x, t),
    "a size beside it": lambda x, t: x * (t * x.shape[0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("name", CALLS)
def test_all_values_share_two_graphs(name, dtype, monkeypatch):
    use_engine(monkeypatch, StubEngine())
    function = CALLS[name]
    run = compiled(function, fallback="error")
    with torch.no_grad():
        for index in range(12):
            x, t = (torch.randn(3, 4) * 3).to(dtype), 0.1 + 0.37 * index
            # Results of 16 bits are equal: a float rounds there as it does in eager torch.
            torch.testing.assert_close(run(x, t), function(x, t), rtol=1e-5, atol=1e-6)
    assert len(report.reports()) == 2


@pytest.mark.parametrize(
    "x", [torch.tensor(3.0), torch.tensor(3), torch.tensor(True), torch.tensor(3.0, dtype=torch.bfloat16)]
)
def test_the_dtype_of_a_tensor_without_dimensions(x, monkeypatch):
    use_engine(monkeypatch, StubEngine())
    run = compiled(lambda x, t: (x * t, x + t, x < t), fallback="error")
    with torch.no_grad():
        for t in (0.3, 1.7, 2.9):
            torch.testing.assert_close(run(x, t), (x * t, x + t, x < t))


def test_the_code_generator_serves_all_values():
    def scaled(x, t):
        return torch.softmax(x / t, -1) * 2

    run = compiled(scaled, fallback="error")
    with torch.no_grad():
        for index in range(10):
            x, t = torch.randn(3, 8), 0.2 + 0.1 * index
            torch.testing.assert_close(run(x, t), scaled(x, t))
    assert len(report.reports()) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, t: F.layer_norm(x, (4,), eps=t),
        lambda x, t: (x * t, t * 2),
        lambda x, t: x.masked_fill(x > 0, t),
    ],
    ids=["eps", "given back", "fill"],
)
def test_a_float_whose_value_is_needed_guards_the_graph(function, monkeypatch):
    use_engine(monkeypatch, StubEngine())
    run = compiled(function, fallback="error")
    x = torch.randn(3, 4)
    with torch.no_grad():
        for t in (0.1, 0.2, 0.7, 0.2):
            torch.testing.assert_close(run(x, t), function(x, t))
    assert len(report.reports()) == 3


def test_an_attribute_that_changes_becomes_an_input(monkeypatch):
    class Warm(nn.Module):
        temperature = 0.5

        def forward(self, x):
            return x / self.temperature

    use_engine(monkeypatch, StubEngine())
    module, x = Warm(), torch.randn(3, 4)
    mark_fixed(x, 0)
    run = compiled(module, fallback="error")
    with torch.no_grad():
        for index in range(10):
            module.temperature = 0.5 + index
            torch.testing.assert_close(run(x), module(x))
    assert len(report.reports()) <= 3
