"""Two threads that call one compiled model at once."""

import pytest
import torch
from torch import nn

from dlinfer.errors import GraphRunError
from tests.graph.compiling import StubEngine, compiled, interpreted_engine, use_engine
from tests.graph.threads import together

pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.fixture(autouse=True, params=["stub", "inductor, interpreted"])
def engine(request, monkeypatch):
    use_engine(monkeypatch, StubEngine() if request.param == "stub" else interpreted_engine(monkeypatch))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.add_(self.linear(self.norm(x) * 2 + 1))
        return cache.sin().sum(0) * 2


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "compiled"])
def test_results_are_each_threads_own(warm):
    model = Model()
    run = compiled(model, dynamic=True)
    if warm:
        with torch.no_grad():
            run(torch.ones(2, 8), torch.zeros(2, 8))

    def work(number):
        for step in range(20):
            x = torch.full((2 + number + step % 3, 8), float(number + step))
            x[:, 0] = 1
            ours, theirs = torch.zeros_like(x), torch.zeros_like(x)
            with torch.no_grad():
                torch.testing.assert_close(run(x, ours), model(x, theirs))
            torch.testing.assert_close(ours, theirs)
        return True

    assert together(2, work) == [True, True]


def test_an_error_in_one_thread_stays_there():
    def picks(x, index):
        return (x * 2 + 1)[index] + 1

    run = compiled(picks)
    x, good, bad = torch.arange(6.0), torch.tensor([1, 2]), torch.tensor([1, 99])
    with torch.no_grad():
        run(x, good)

    def work(number):
        for _ in range(20):
            with torch.no_grad():
                if number:
                    with pytest.raises(GraphRunError, match="out of"):
                        run(x, bad)
                else:
                    torch.testing.assert_close(run(x, good), picks(x, good))
        return True

    assert together(2, work) == [True, True]
