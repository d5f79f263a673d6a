"""Compiled calls on disk: a second process runs without capturing; what does not fit is compiled anew."""

import copy
import json

import pytest
import torch
from torch import nn

from dlinfer import settings
from dlinfer.errors import CaptureError
from dlinfer.explanation.fields import Facts
from dlinfer.explanation.text import text_of
from dlinfer.graph.bound_call import store as bound_store
from dlinfer.graph.bound_call.store import CallStore, compile_call
from dlinfer.graph.cache import disk
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report import report
from dlinfer.graph.torch_private import dynamo
from tests.graph.compiling import StubEngine

pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    chosen = StubEngine()
    monkeypatch.setattr("dlinfer.graph.backend.find_engine", lambda name, device: chosen)
    monkeypatch.setattr(bound_store, "find_engine", lambda name, device: chosen)
    return chosen


@pytest.fixture
def folder(tmp_path):
    return CompileOptions(cache_dir=tmp_path)


STEADY = ["cache", "x.size()[1]"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 0.5

    def forward(self, x: torch.Tensor, cache: torch.Tensor, steps: int) -> torch.Tensor:
        cache.add_(x.sum(0))
        return (self.linear(x) * self.scale + cache[0] * steps).clamp(max=float("inf"))


def arguments(rows: int = 3) -> dict:
    return {"x": torch.arange(4.0 * rows).view(rows, 4) / 7, "cache": torch.zeros(8, 4), "steps": 2}


def right(call, model, rows=3):
    ours, theirs = arguments(rows), arguments(rows)
    with torch.no_grad():
        torch.testing.assert_close(call(**ours), model(**theirs))
    torch.testing.assert_close(ours["cache"], theirs["cache"])


def test_the_second_time_it_comes_from_disk(folder, monkeypatch):
    model = Model()
    first, result, stored = compile_call(
        model, arguments(), identity="model 1", steady=STEADY, options=folder
    )
    with torch.no_grad():
        torch.testing.assert_close(result, model(**arguments()))
    assert not stored

    def captures(*args, **kwargs):
        raise AssertionError("captured again")

    monkeypatch.setattr(bound_store, "capture_call", captures)
    second, again, stored = compile_call(
        model, arguments(), identity="model 1", steady=STEADY, options=folder
    )
    assert stored
    torch.testing.assert_close(again, result)
    for call in (first, second):
        right(call, model)
        right(call, model, rows=7)
    assert report.reports()[-1].cause == "loaded from the disk cache"


def test_an_artifact_holds_no_weights(folder):
    model = Model()
    model.linear = nn.Linear(4, 4).requires_grad_(False)
    compile_call(model, arguments(), identity="m", steady=STEADY, options=folder)
    model.linear.weight.fill_(3)
    again, _, stored = compile_call(model, arguments(), identity="m", steady=STEADY, options=folder)
    assert stored
    right(again, model)


@pytest.mark.parametrize(
    ("identity", "options"),
    [
        ("model 2", {}),
        ("model 1", {"small_regions": "engine"}),
        ("model 1", {"passes": {"cse": False}}),
        ("model 1", {"eager_ops": ["aten.add"]}),
        ("model 1", {"fallback": "error"}),
    ],
)
def test_another_identity_or_option_is_another_call(identity, options, tmp_path):
    compile_call(
        Model(), arguments(), identity="model 1", steady=STEADY, options=CompileOptions(cache_dir=tmp_path)
    )
    other = CompileOptions(cache_dir=tmp_path, **options)
    assert compile_call(Model(), arguments(), identity=identity, steady=STEADY, options=other)[2] is False


def test_a_name_in_another_list_is_another_call(tmp_path):
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, rms_norm: torch.Tensor) -> torch.Tensor:
            return x * rms_norm

    given = {"x": torch.ones(3, 4), "rms_norm": torch.ones(())}
    without = CompileOptions(cache_dir=tmp_path, passes={"rms_norm": False})
    assert not compile_call(Scaled(), given, identity="m", options=without)[2]
    plain = CompileOptions(cache_dir=tmp_path)
    assert not compile_call(Scaled(), given, identity="m", steady=("rms_norm",), options=plain)[2]
    assert not compile_call(Scaled(), given, identity="rms_norm\nm", options=plain)[2]


def test_what_differs_is_in_the_report(folder):
    compile_call(Model(), arguments(), identity="a\nb", steady=STEADY, options=folder)
    for identity, said in (("a\nc", "content: b is stored, c is wanted"), ("a\nb", "")):
        call, _, stored = compile_call(Model(), arguments(), identity=identity, steady=STEADY, options=folder)
        assert (stored, call.report.not_loaded) == (not said, said)
    model = Model()
    model.scale = 0.75
    call, _, _ = compile_call(model, arguments(), identity="a\nb", steady=STEADY, options=folder)
    assert "self.scale" in call.report.not_loaded
    assert "self.scale" in text_of(Facts("m", [call.report]))


def test_options_from_the_settings_count_too(folder):
    compile_call(Model(), arguments(), identity="m", steady=STEADY, options=folder)
    with settings.override(small_regions="engine"):
        assert not compile_call(Model(), arguments(), identity="m", steady=STEADY, options=folder)[2]
    assert compile_call(Model(), arguments(), identity="m", steady=STEADY, options=folder)[2]


@pytest.mark.parametrize(
    "change",
    [
        lambda model, given: setattr(model, "scale", 0.75),
        lambda model, given: (
            given.update(x=given["x"].double(), cache=given["cache"].double()) or model.double()
        ),
        lambda model, given: setattr(
            model, "linear", nn.Linear(4, 4).bfloat16().float().requires_grad_(False)
        ),
    ],
    ids=["a folded number", "dtypes", "another weight of that shape"],
)
def test_what_does_not_fit_is_compiled_anew_and_right(change, folder):
    compile_call(Model(), arguments(), identity="m", steady=STEADY, options=folder)
    model, given = Model(), arguments()
    change(model, given)
    result = compile_call(model, copy.deepcopy(given), identity="m", steady=STEADY, options=folder)[1]
    with torch.no_grad():
        torch.testing.assert_close(result, model(**given))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data["graph"]["program"]["steps"].pop(0),
        lambda data: data["graph"]["regions"]["region_0"]["steps"][0].update(
            callee="op aten.no_such_op.default"
        ),
        lambda data: data.pop("interface"),
    ],
)
def test_a_damaged_call_is_compiled_anew(damage, folder):
    model = Model()
    compile_call(model, arguments(), identity="m", steady=STEADY, options=folder)
    store = CallStore(folder, model, STEADY, "m", torch.device("cpu"))
    (path,) = store.cache.folder.iterdir()

    def rewritten():
        payload = disk._payload(path.read_bytes(), path.name)
        assert payload is not None
        data = json.loads(payload)
        damage(data)
        return json.dumps(data).encode()

    assert store.cache.store(store.key, rewritten)  # with a right checksum
    call, _, stored = compile_call(model, arguments(), identity="m", steady=STEADY, options=folder)
    assert not stored
    right(call, model)


def test_what_cannot_be_stored_still_runs(folder):
    class Branches(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))

    model = Branches()
    for _ in range(2):
        call, result, stored = compile_call(model, {"x": torch.ones(3)}, identity="m", options=folder)
        assert not stored
        torch.testing.assert_close(result, torch.ones(3).sin())
        torch.testing.assert_close(call(x=-torch.ones(3)), (-torch.ones(3)).cos())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (torch._dynamo.graph_break(), x * 2)[1], "captured as a graph"),
        (lambda x: x * 2 if x.sum() > 0 else x, "captured as a graph"),
        (lambda x: (x, x * 2), "it does not return exactly one tensor"),
        (lambda x: x, "its result is a view of x, and a call may have to copy x"),
        (lambda x: x.view(-1, 1), "its result is a view of x, and a call may have to copy x"),
    ],
)
def test_what_is_not_one_graph_with_one_result_is_refused(function, message, folder):
    class Wrapped(nn.Module):
        def forward(self, x):
            return function(x)

    with pytest.raises(CaptureError, match=message):
        compile_call(Wrapped(), {"x": torch.ones(3)}, identity="m", options=folder)


def test_sizes_marked_as_unknown_take_any(folder):
    class Plain(nn.Module):
        def forward(self, x):
            return x * 2 + 1

    x = torch.ones(3, 4)
    dynamo.mark_unbacked(x, 0, "rows")
    call, _, _ = compile_call(Plain(), {"x": x}, identity="m", options=folder)
    again, _, stored = compile_call(Plain(), {"x": torch.ones(1, 4)}, identity="m", options=folder)
    assert stored
    for one in (call, again):
        for rows in (1, 2, 9):
            given = torch.ones(rows, 4)
            one.check({"x": given})
            torch.testing.assert_close(one(x=given), given * 2 + 1)


def test_an_argument_left_at_its_default_is_read_at_each_call(folder):
    class Repeats(nn.Module):
        def forward(self, x: torch.Tensor, times: int = 3) -> torch.Tensor:
            return x.sum() * times

    model, x = Repeats(), torch.randn(4)
    call, _, _ = compile_call(model, {"x": x}, identity="defaults", options=folder)
    torch.testing.assert_close(call(x=x), model(x))
