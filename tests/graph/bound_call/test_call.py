"""Constants of a bound call: arguments, flags, numbers, globals and hooks that change are refused by name."""

import pytest
import torch
from torch import nn

from dlinfer.errors import ArtifactInputError, CaptureError
from dlinfer.graph.bound_call.capture import capture_call
from dlinfer.graph.bound_call.sources import Traced
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.torch_private.dynamo import mark_fixed
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


class Flagged(nn.Module):
    def forward(self, x, doubled=False, kind="plain", shift=None):
        y = x * 2 if doubled else x
        y = y + 1 if kind == "shifted" else y
        return y * 3 if shift is None else y + shift


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("doubled", True, r"'doubled'.*expected False, given True"),
        ("doubled", None, r"'doubled'.*expected False, given None"),
        ("kind", "shifted", r"'kind'.*expected 'plain', given 'shifted'"),
        ("shift", torch.ones(4), r"'shift'.*expected None, given a torch\.float32 tensor"),
    ],
    ids=["flag", "no flag", "text", "tensor for None"],
)
def test_an_argument(name, value, said):
    module, x = Flagged(), rows()
    call = captured(module, x=x)
    call(x=x)
    binding = call._binding
    with pytest.raises(ArtifactInputError, match=said):
        call(x=x, **{name: value})
    for given in ({}, {"doubled": False, "kind": "".join(("pl", "ain"))}):
        assert torch.equal(call(x=x, **given), module(x))
    assert call._binding is binding


def test_an_argument_that_a_later_call_leaves_out():
    module, x = Flagged(), rows()
    call = captured(module, x=x, doubled=True)
    assert torch.equal(call(x=x, doubled=True), module(x, doubled=True))
    with pytest.raises(ArtifactInputError, match=r"'doubled'.*expected True, given False"):
        call(x=x)


class Config:
    def __init__(self, doubled):
        self.doubled = doubled


class Holding(nn.Module):
    shared = 3

    def __init__(self):
        super().__init__()
        self.drop, self.config = nn.Dropout(0.5), Config(False)
        self.sizes, self.table = [2, 5], {"a": 7}

    def forward(self, x):
        x = x * 2 if self.config.doubled else x
        return self.drop(x) * self.sizes[1] * self.table["a"] * self.shared


def _replace_by_its_like(module):
    module.drop, module.config = nn.Dropout(0.5).eval(), Config(False)


CHANGES = {
    "module": (lambda module: setattr(module, "drop", nn.Dropout(0.5)), r"'self\.drop\.training'"),
    "object": (lambda module: setattr(module, "config", Config(True)), r"'self\.config\.doubled'"),
    "item": (lambda module: module.sizes.__setitem__(1, 6), r"self\.sizes"),
    "list": (lambda module: setattr(module, "sizes", [2, 6]), r"self\.sizes"),
    "dict": (lambda module: module.table.update(a=8), r"self\.table"),
    "attribute of the class": (lambda module: setattr(module, "shared", 4), r"'self\.shared'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_owner_holds(name):
    change, said = CHANGES[name]
    module, x = Holding().eval(), rows()
    call = captured(module, x=x)
    call(x=x)
    binding = call._binding
    assert torch.equal(call(x=x), module(x))
    assert call._binding is binding
    _replace_by_its_like(module)
    assert torch.equal(call(x=x), module(x))
    change(module)
    with pytest.raises(ArtifactInputError, match=said):
        call(x=x)


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


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_of_the_function_itself(model, register):
    x = rows()
    call = captured(model, x=x)
    call(x=x)
    hook = getattr(model, register)(lambda *_: None)
    with pytest.raises(ArtifactInputError, match=r"self\._forward.*expected no hook, given 1 hooks"):
        call(x=x)
    with pytest.raises(CaptureError, match="it has hooks, which a compiled call would skip"):
        captured(model, x=x)
    hook.remove()
    torch.testing.assert_close(call(x=x), model(x))


def test_a_receiver_that_is_not_called_self():
    module, x = Other(4, 4).requires_grad_(False), rows()
    assert (Traced(module).receiver, Traced(module.forward).receiver) == ("this", "this")
    call = captured(module, input=x)
    module.weight.mul_(2)
    torch.testing.assert_close(call(input=x), module(x))
    module.in_features = 7
    with pytest.raises(ArtifactInputError, match=r"'self\.in_features'.*expected 4, given 7"):
        call(input=x)
