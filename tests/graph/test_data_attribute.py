"""``x.data`` read and assigned in a model, as EMA codebooks, observers and step counters do."""

import copy

import pytest
import torch
from torch import nn

from tests.graph.compiling import (
    ValueEngine,
    compiled,
    interpreted_engine,
    last_report,
    use_engine,
)

pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.fixture(params=["inductor", "values"])
def engine(request, monkeypatch):
    engine = interpreted_engine(monkeypatch) if request.param == "inductor" else ValueEngine()
    use_engine(monkeypatch, engine)


class Average(nn.Module):
    """Assigns a buffer, which then lies in memory that the call before has made."""

    seen: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen.data = self.seen.data * 0.9 + x
        return x * 2 + self.seen


def assigns_argument(x):
    x.data = x * 2
    return x + 1


def assigns_twice(x):
    x.data = x * 2
    y = x + 1
    x.data = y * 3
    return x + y


def reads(x):
    return x.data * 2 + 1


def writes_through(x):
    y = x.data
    y.add_(1)
    y.mul_(x)
    return y + x


def reshapes(x):
    y = x.data
    y.unsqueeze_(0)
    return y + 1, x * 2


def assigns_what_it_returns(x):
    y = x * 2
    x.data = y
    y.add_(1)
    return y, x + 1


def writes_what_it_assigned(x):
    x.data = x * 2
    x.add_(1)
    return x


def writes_it_unread(x):
    x.data = x * 2
    x.add_(1)


def writes_a_part_of_it(x):
    old = x[1:]
    x.data = x * 2
    x[1:].mul_(3)
    old.add_(1)
    return x + 1, old


FUNCTIONS = [
    Average(),
    assigns_argument,
    assigns_twice,
    reads,
    writes_through,
    reshapes,
    writes_what_it_assigned,
    writes_it_unread,
    writes_a_part_of_it,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: getattr(one, "__name__", "buffer"))
def test_as_in_eager(function, engine):
    check(function)


def test_a_result_that_is_the_arguments_memory_now(monkeypatch):
    use_engine(monkeypatch, interpreted_engine(monkeypatch))
    check(assigns_what_it_returns)


def check(function):
    ours, theirs = copy.deepcopy(function), copy.deepcopy(function)
    run = compiled(ours)
    with torch.no_grad():
        for _ in range(3):
            x, want_x = torch.arange(3.0), torch.arange(3.0)
            torch.testing.assert_close(run(x), theirs(want_x))
            torch.testing.assert_close(x, want_x)
    assert not last_report().refused
    if isinstance(function, nn.Module):
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
