"""Sizes in compiled graphs: computed ones, rounded ones, and such as no input shows by itself."""

import math

import pytest
import torch
import torch.nn.functional as F

from dlinfer.vendor.cpu.inductor.engine import InductorEngine
from tests.graph.compiling import StubEngine, compiled, same_as_eager, use_engine

pytestmark = pytest.mark.usefixtures("graph_mode")

w = torch.randn(8, 8)


def grid(rows: int) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def doubled_rows(x):
    """The loops behind the linear layer see twice the size that the graph's input has, and no more of it."""
    return F.linear(torch.cat([x, x]), w).relu() * 2 + 1


def halves_rounded_down(x):
    return x[: int(x.shape[0] * 0.5)] * 2 + 1


def thirds_rounded_up(x):
    return x[: math.ceil(x.shape[0] / 3)] * math.floor(x.shape[0] / 2) + round(x.shape[0] / 4)


def padded_to_chunks(x):
    return F.pad(x.sin(), (0, 0, 0, -x.shape[0] % 8)).view(-1, 8, 8) * 2 + 1


@pytest.mark.parametrize("function", [doubled_rows, halves_rounded_down, thirds_rounded_up, padded_to_chunks])
@pytest.mark.parametrize("refused", [(), ("aten.cat", "aten.linear")], ids=["one region", "two regions"])
def test_one_graph_serves_all_rows(function, refused, monkeypatch):
    engine = InductorEngine()
    plain = engine.refuses
    monkeypatch.setattr(engine, "refuses", lambda node: StubEngine(refused).refuses(node) or plain(node))
    use_engine(monkeypatch, engine)
    run = compiled(function, dynamic=True, small_regions="engine")
    with torch.no_grad():
        for rows in (12, 5, 40):
            torch.testing.assert_close(run(grid(rows)), function(grid(rows)), rtol=1e-5, atol=1e-5)


def test_numbers_read_from_tensors_stay_apart():
    def both(x, lengths):
        first, again = lengths.max().item(), lengths.max().item()
        torch._check(first >= 0)
        torch._check(again >= 0)
        return x.new_ones(first).cumsum(0) * 2 + 1, x.new_ones(again * 2).sin() * 3 + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        same_as_eager(both, grid(3), torch.tensor([2, 5]), small_regions="engine")


@pytest.mark.parametrize("bias", [(1,), (1, 8), (3, 8)], ids=str)
def test_linear_takes_what_torchs_does(bias):
    same_as_eager(lambda x, b: F.linear(x, w, b) * 2, grid(3), torch.randn(bias), small_regions="engine")
    same_as_eager(
        lambda x, b: (F.linear(x, w, b), F.linear(x, w + 1, b)),
        grid(3),
        torch.randn(bias),
        small_regions="engine",
    )


def test_a_vector_as_weight():
    same_as_eager(lambda x, v: F.linear(x, v) * 2 + 1, grid(3), torch.randn(8), small_regions="engine")
