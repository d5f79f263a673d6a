"""What a bound call holds is compared at each call, what changes is checked, and threads never mix two bindings."""

import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.bound_call.capture import capture_call
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.torch_private.dynamo import mark_unbacked
from tests.graph.compiling import StubEngine, use_engine

pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    use_engine(monkeypatch, StubEngine())


def captured(function, steady=(), **kwargs):
    return capture_call(function, kwargs, steady=steady, options=CompileOptions())[0]


class Layers(nn.Module):
    """Weights, a buffer of one element, a plain tensor, a list, a dict and a number of its own."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(4)
        self.register_buffer("shift", torch.ones(1))
        self.plain = torch.full((4,), 2.0)
        self.several = [torch.full((4,), 3.0)]
        self.named = {"a": torch.full((1,), 4.0)}
        self.factor = 0.5

    def forward(self, x: torch.Tensor, cache: list[list[torch.Tensor]]) -> torch.Tensor:
        for layer, (key, value) in zip(self.layers, cache, strict=True):
            x = layer(x) + key.sum() * value.mean()
        x = self.norm(x) * self.factor + self.plain + self.several[0]
        return x + self.shift + self.named["a"]


def caches(value: float = 1.0) -> list[list[torch.Tensor]]:
    return [[torch.full((6, 2), value + 2 * i), torch.full((6, 2), value + 2 * i + 1)] for i in range(2)]


def x(rows: int = 3) -> torch.Tensor:
    given = torch.arange(4.0 * rows).view(rows, 4) / 7
    mark_unbacked(given, 0, "rows")
    return given


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Layers().requires_grad_(False)


def compiled(model, cache):
    return captured(model, steady=["cache", "x.size()[1]"], x=x(), cache=cache)


def right(call, model, cache, rows=3):
    with torch.no_grad():
        torch.testing.assert_close(call(x=x(rows), cache=cache), model(x=x(rows), cache=cache))


# --- what is steady


def replace_first_key(model, cache):
    cache[0][0] = torch.full((6, 2), 70.0)


def replace_pair(model, cache):
    cache[1] = [torch.full((6, 2), 70.0), torch.full((6, 2), 80.0)]


def swap_keys(model, cache):
    cache[0][0], cache[1][0] = cache[1][0], cache[0][0]


def replace_weight(model, cache):
    model.layers[1].weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)


def replace_weight_data(model, cache):
    model.layers[1].weight.data = torch.full((4, 4), 0.25)


def write_weight(model, cache):
    model.layers[1].weight.fill_(0.25)


def load_in_place(model, cache):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def load_assigned(model, cache):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


def replace_module(model, cache):
    model.layers[0] = nn.Linear(4, 4).requires_grad_(False)


def replace_list_of_modules(model, cache):
    model.layers = nn.ModuleList([nn.Linear(4, 4).requires_grad_(False) for _ in range(2)])


def replace_buffer(model, cache):
    """By one that is equal at first, so that no comparison by value sees it."""
    model.shift = torch.ones(1)


def replace_plain_tensor(model, cache):
    model.plain = torch.full((4,), 20.0)


def replace_listed_tensor(model, cache):
    model.several[0] = torch.full((4,), 20.0)


def replace_named_tensor(model, cache):
    model.named["a"] = torch.full((1,), 4.0)


def replace_named_dict(model, cache):
    model.named = {"a": torch.full((1,), 40.0)}


KINDS = ("replace", "swap", "write", "load")
CHANGES = [value for name, value in list(globals().items()) if name.startswith(KINDS)]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_replaced_or_written_is_seen_by_the_next_call(change, model):
    cache = caches()
    call = compiled(model, cache)
    right(call, model, cache)
    for _ in range(2):
        change(model, cache)
        right(call, model, cache, rows=5)
    for tensor in (model.shift, model.named["a"], cache[0][0]):
        tensor.add_(5)  # the new one is read, and not an old one that was equal to it
        right(call, model, cache)


def test_what_did_not_change_is_bound_once(model, monkeypatch):
    cache = caches()
    call = compiled(model, cache)
    right(call, model, cache)
    monkeypatch.setattr(call, "_bind", None)
    for rows in (1, 2, 7):
        right(call, model, cache, rows)


def test_what_does_not_fit_is_refused_and_what_fits_runs_again(model):
    cache = caches()
    call = compiled(model, cache)
    right(call, model, cache)
    kept = cache[1][0]
    wrong: Any
    for wrong, given in (
        (kept.double(), r"float64"),
        (kept[None], r"sizes \(1, 6, 2\)"),
        (kept.t().contiguous().t(), r"strides \(1, 6\)"),
        (None, "None"),
    ):
        cache[1][0] = wrong
        with pytest.raises(ArtifactInputError, match=rf"'?cache\[1\]\[0\]'?.*{given}"):
            call(x=x(), cache=cache)
    cache[1][0] = kept
    right(call, model, cache)
    model.factor = 0.75
    with pytest.raises(ArtifactInputError, match=r"factor.*0\.5.*0\.75"):
        call(x=x(), cache=cache)


def test_a_list_that_lost_an_element_is_refused(model):
    cache = caches()
    call = compiled(model, cache)
    cache[0].pop()
    with pytest.raises(ArtifactInputError, match=r"cache\[0\]\[1\].*nothing"):
        call(x=x(), cache=cache)


def test_a_converted_model_is_read_anew_after_unbind(model):
    cache = caches()
    call = compiled(model, cache)
    model.double()
    call.unbind()
    with pytest.raises(ArtifactInputError, match=r"float64"):
        call(x=x(), cache=cache)
    model.float()
    right(call, model, cache)


@dataclass
class Meta:
    """Of which ``width`` never changes."""

    width: int
    rows: torch.Tensor = field(default_factory=lambda: torch.ones(1))


def test_a_number_that_never_changes_is_compared():
    def cut(x: torch.Tensor, meta: Meta) -> torch.Tensor:
        return x.view(-1, meta.width) + meta.rows

    flat = torch.arange(12.0)
    call = captured(cut, steady=["x", "meta.width"], x=flat, meta=Meta(4))
    torch.testing.assert_close(call(x=flat, meta=Meta(4, torch.ones(1) * 3)), flat.view(3, 4) + 3)
    for width in (6, 3):
        try:
            given = call(x=flat, meta=Meta(width))
        except ArtifactInputError as error:
            assert "meta.width" in str(error)
        else:
            torch.testing.assert_close(given, flat.view(-1, width) + 1)


# --- what changes


def doubled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * 2 + by


WRONG = {
    "float64": lambda x: x.double(),
    "int64": lambda x: x.long(),
    "bfloat16": lambda x: x.bfloat16(),
    "a dimension more": lambda x: x[None],
    "a dimension less": lambda x: x[0],
    "another device": lambda x: x.to("meta"),
    "another size": lambda x: torch.cat([x, x], 1),
    "a number": lambda x: 3.0,
    "a list": lambda x: x.tolist(),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_changing_input_that_does_not_fit_is_refused_by_name(wrong):
    call = captured(doubled, steady=["x.size()[1]", "by"], x=x(), by=torch.ones(4))
    by = torch.ones(4)
    torch.testing.assert_close(call(x=x(2), by=by), doubled(x(2), by))
    with pytest.raises(ArtifactInputError, match=r"input 'x\b.*, given "):
        call(x=WRONG[wrong](x()), by=by)
    torch.testing.assert_close(call(x=x(7), by=by), doubled(x(7), by))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_changing_input_may_lie_in_any_strides(rows):
    by = torch.ones(4)
    given = [
        x(rows).t().contiguous().t(),
        x(2 * rows)[::2],
        torch.ones(1, 4).expand(rows, 4),
        x(rows + 1)[1:],
    ]
    for first in given:  # the first call binds, the later ones do not
        call = captured(doubled, steady=["x.size()[1]", "by"], x=x(), by=by)
        for one in (first, *given):
            torch.testing.assert_close(call(x=one, by=by), doubled(one, by))


def test_a_changing_number_keeps_its_type():
    def scaled(x: torch.Tensor, times: int) -> torch.Tensor:
        return x.sum() * times

    one = torch.ones(3)
    mark_unbacked(one, 0, "rows")
    call = captured(scaled, x=one, times=7)
    assert call(x=torch.ones(2), times=3).item() == 6
    with pytest.raises(ArtifactInputError, match=r"times.*number of type int.*2\.5"):
        call(x=torch.ones(2), times=2.5)


# --- threads


@pytest.fixture
def hurried():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried")
def test_threads_with_caches_of_their_own_never_read_each_others(model):
    both = [caches(1.0), caches(50.0)]
    call = compiled(model, both[0])
    with torch.no_grad():
        expected = [model(x=x(), cache=cache) for cache in both]
    wrong: list[int] = []
    start = threading.Barrier(4)

    def run(number: int) -> None:
        start.wait()
        for step in range(300):
            with torch.no_grad():
                given = call(x=x(), cache=both[number % 2])
            if not torch.equal(given, expected[number % 2]):
                wrong.append(step)
            if number == 3 and step % 7 == 0:
                call.unbind()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_call_reads_what_it_bound_though_another_binds_in_between(model, monkeypatch):
    mine, others = caches(1.0), caches(50.0)
    call = compiled(model, mine)
    bind = call._bind
    between = iter([lambda: call(x=x(), cache=others)])

    def interrupted(*args):
        bound = bind(*args)
        next(between, lambda: None)()
        return bound

    monkeypatch.setattr(call, "_bind", interrupted)
    right(call, model, mine)


def test_unbind_lets_go_of_caches_and_weights(model):
    import gc
    import weakref

    cache = caches()
    call = compiled(model, cache)
    right(call, model, cache)
    held = weakref.ref(cache[0][0])
    call.unbind()
    del cache
    gc.collect()
    assert held() is None
