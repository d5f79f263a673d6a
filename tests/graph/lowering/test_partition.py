"""Partition with an engine that refuses some ops: numbers, regions, reasons, policy, order of writes."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from dlinfer.errors import GraphFallbackError
from dlinfer.ops.core import fallback
from dlinfer.ops.core.fallback import FallbackWarning
from tests.graph.compiling import StubEngine, compiled, last_report, same_as_eager, use_engine

pytestmark = pytest.mark.usefixtures("graph_mode")
x = torch.randn(4, 6)


def chain(x):
    return ((x * 2).sin() + 1).cos() * 3


def two_branches(x):
    left = (x * 2).sin() + 1
    right = (x - 3).sin() * 4
    return left + right


def test_nothing_refused_is_one_region(monkeypatch):
    engine = StubEngine()
    use_engine(monkeypatch, engine)
    same_as_eager(two_branches, x)
    assert len(engine.regions) == 1
    report = last_report()
    assert [region.name for region in report.regions] == ["region_0"]
    assert {node.place for node in report.nodes} <= {"engine", "size", "view"}
    assert not report.refusals()


def test_refused_nodes_run_eagerly_with_the_reason(monkeypatch):
    engine = StubEngine(refused=["aten.sin"])
    use_engine(monkeypatch, engine)
    same_as_eager(chain, x)
    assert engine.regions == [["aten.mul.Tensor"], ["aten.add.Tensor", "aten.cos", "aten.mul.Tensor"]]
    ((op, reason),) = last_report().refusals()
    assert (op, reason) == ("aten.sin", "the stub has no aten.sin")


def test_regions_are_maximal(monkeypatch):
    engine = StubEngine(refused=["aten.sin"])
    use_engine(monkeypatch, engine)
    same_as_eager(two_branches, x)
    assert sorted(map(len, engine.regions)) == [2, 3], (
        "both branches before their sin are one region, and after it"
    )


def test_everything_refused(monkeypatch):
    engine = StubEngine(refused=["aten.sin", "aten.cos", "aten.mul.Tensor", "aten.add.Tensor"])
    use_engine(monkeypatch, engine)
    same_as_eager(chain, x)
    assert engine.regions == []


def test_policy_error_names_op_line_call_and_engine(monkeypatch):
    use_engine(monkeypatch, StubEngine(refused=["aten.sin"]))
    with torch.no_grad(), pytest.raises(GraphFallbackError) as caught:
        compiled(chain, fallback="error")(x)
    text = str(caught.value)
    line = chain.__code__.co_firstlineno + 1
    for part in (
        "aten.sin",
        "float32[4, 6]",
        f"{__file__}:{line}, in chain",
        "'stub'",
        "the stub has no aten.sin",
    ):
        assert part in text


def test_policy_warn_says_it_once(monkeypatch):
    use_engine(monkeypatch, StubEngine(refused=["aten.sin"]))
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        for function in (chain, two_branches):
            compiled(function, fallback="warn")(x)
    (told,) = [str(one.message) for one in caught if one.category is FallbackWarning]
    assert "aten.sin runs outside graph engine 'stub'" in told
    assert __file__ in told


@pytest.mark.parametrize("kept", ["eager", "engine"])
def test_small_regions(kept, monkeypatch):
    engine = StubEngine(refused=["aten.sin"], smallest=2)
    use_engine(monkeypatch, engine)
    same_as_eager(chain, x, small_regions=kept)
    assert len(engine.regions) == {"eager": 1, "engine": 2}[kept]
    reasons = {reason for _, reason in last_report().refusals()}
    assert reasons == {"the stub has no aten.sin"} | ({"1 of 2 nodes"} if kept == "eager" else set())


def test_small_regions_are_no_fault_under_policy_error(monkeypatch):
    use_engine(monkeypatch, StubEngine(smallest=100))
    with torch.no_grad():
        torch.testing.assert_close(compiled(chain, fallback="error")(x), chain(x))


def write_between_reads(x):
    before = (x * 2).sum()
    x.add_(1)
    between = (x * 2).sum().sin()
    x.mul_(3)
    return before, between, x.sin().sum()


def writes_in_both_places(x, y):
    y.copy_(x.sin())
    x.add_(y)
    y.add_(x.sum())
    x.mul_(y.sin())
    return x + y


def draws_in_both_places(x):
    a = torch.rand(4, 6).sin()
    b = F.dropout(x, 0.5)
    return a + b.sin(), torch.rand(3)


@pytest.mark.parametrize(
    "refused",
    [
        ["aten.sin"], ["aten.sum"], ["aten.add_.Tensor"], ["aten.mul_.Tensor"], ["aten.copy_", "aten.sum"],
        ["aten.mul.Tensor", "aten.add_.Tensor"], ["aten.rand"], ["aten.dropout"],
    ],
)  # fmt: skip
def test_writes_and_draws_keep_their_order_across_regions(refused, monkeypatch):
    use_engine(monkeypatch, StubEngine(refused=refused))
    same_as_eager(write_between_reads, x)
    same_as_eager(writes_in_both_places, x, x * 2)
    same_as_eager(draws_in_both_places, x)


def test_a_refused_view_costs_no_fallback_error(monkeypatch):
    use_engine(monkeypatch, StubEngine(refused=["aten.view"]))
    with torch.no_grad():
        given = compiled(lambda x: x.view(-1) * 2, fallback="error")(x)
    torch.testing.assert_close(given, x.view(-1) * 2)


@pytest.mark.parametrize("names", [["aten.sin"], ["aten.add", "aten.cos"], ["aten.mul.Tensor", "aten.sub"]])
def test_ops_of_eager_ops_stay_out_of_the_engine(names, monkeypatch):
    engine = StubEngine()
    use_engine(monkeypatch, engine)
    counted = fallback.counts()
    for function in (chain, two_branches):
        same_as_eager(function, x, eager_ops=names, fallback="error")
    assert fallback.counts() == counted
    left = {op for op, _ in last_report().refusals()}
    assert left and all(any(op.startswith(name) for name in names) for op in left)
    assert {reason for _, reason in last_report().refusals()} == {"excluded by eager_ops"}
    assert left.isdisjoint(op for region in engine.regions for op in region)


def test_all_results_of_an_op_of_eager_ops_stay_with_it(monkeypatch):
    engine = StubEngine()
    use_engine(monkeypatch, engine)
    same_as_eager(
        lambda x: x.sin().topk(2)[0] * 2 + x.cos().max(0)[1][:2], x, eager_ops=["aten.topk", "aten.max"]
    )
    taken = {op for region in engine.regions for op in region}
    assert "aten.sin" in taken
    assert not [op for op in taken if "getitem" in op or "topk" in op or "max" in op]


@pytest.mark.parametrize("names", [["aten.sym_size"], ["aten.view"], ["aten.add_"]])
def test_sizes_views_and_writes_may_be_eager_ops(names, monkeypatch):
    use_engine(monkeypatch, StubEngine())
    same_as_eager(lambda x: x.add_(1).view(-1) * x.size(0), x, dynamic=True, eager_ops=names)


def test_constants_reach_regions_and_eager_nodes(monkeypatch):
    use_engine(monkeypatch, StubEngine(refused=["aten.sin"]))
    same_as_eager(lambda x: (x + torch.tensor([1.0, 2, 3, 4, 5, 6])) * torch.tensor([0.5]).sin(), x)
