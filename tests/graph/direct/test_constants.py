"""Constants of a direct call: flags, numbers, globals and hooks that change afterwards are refused by name."""

import pytest
import torch
from torch import nn

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.direct.call import capture_call
from dlinfer.graph.direct.constants import receiver_of
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.seam.dynamo import mark_fixed
from tests.graph.compiling import StubEngine, use_engine

pytestmark = pytest.mark.usefixtures("graph_mode")

SCALE = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.doubled, self.times, self.kind = False, 3, "plain"

    def forward(self, x):
        y = self.layer(x) * 2 if self.doubled else self.layer(x)
        y = y + 1 if self.kind == "shifted" else y
        return self.drop(y) * SCALE * self.times


class Other(nn.Linear):
    def forward(this, input):  # noqa: N805  # pyright: ignore[reportSelfClsParameterName]
        return torch.nn.functional.linear(input, this.weight, this.bias) * this.in_features


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    use_engine(monkeypatch, StubEngine())


@pytest.fixture
def model():
    return Model().eval().requires_grad_(False)


def rows():
    given = torch.randn(3, 4)
    mark_fixed(given, 1)
    return given


def captured(function, **kwargs):
    return capture_call(function, kwargs, steady=(), options=CompileOptions())[0]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("doubled", True, r"'self\.doubled'.*expected False, given True"),
        ("times", 5, r"'self\.times'.*expected 3, given 5"),
        ("kind", "shifted", r"'self\.kind'.*expected 'plain', given 'shifted'"),
    ],
)
def test_an_attribute(model, name, value, said):
    x = rows()
    call, before = captured(model, x=x), getattr(model, name)
    setattr(model, name, value)
    with pytest.raises(ArtifactInputError, match=said):
        call(x=x)
    setattr(model, name, before)
    torch.testing.assert_close(call(x=x), model(x))


def test_a_global(model, monkeypatch):
    x = rows()
    call = captured(model, x=x)
    call(x=x)
    monkeypatch.setitem(globals(), "SCALE", 3)
    with pytest.raises(ArtifactInputError, match=r"SCALE.*expected 2, given 3"):
        call(x=x)


def test_train(model):
    x = rows()
    call = captured(model, x=x)
    call(x=x)
    model.train()
    with pytest.raises(ArtifactInputError, match=r"'self\.drop\.training'.*expected False, given True"):
        call(x=x)
    model.eval()
    torch.testing.assert_close(call(x=x), model(x))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook(model, register):
    x = rows()
    call = captured(model, x=x)
    call(x=x)
    elsewhere = nn.Linear(4, 4).register_forward_hook(lambda *_: None)
    torch.testing.assert_close(call(x=x), model(x))
    hook = getattr(model.layer, register)(lambda *_: None)
    with pytest.raises(ArtifactInputError, match=r"self\.layer\._forward.*expected no hook, given 1 hooks"):
        call(x=x)
    hook.remove()
    elsewhere.remove()
    torch.testing.assert_close(call(x=x), model(x))


def test_a_receiver_that_is_not_called_self():
    module, x = Other(4, 4).requires_grad_(False), rows()
    assert (receiver_of(module), receiver_of(module.forward)) == ("this", "this")
    call = captured(module, input=x)
    module.weight.mul_(2)
    torch.testing.assert_close(call(input=x), module(x))
    module.in_features = 7
    with pytest.raises(ArtifactInputError, match=r"'self\.in_features'.*expected 4, given 7"):
        call(input=x)
