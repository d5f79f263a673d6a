"""Regions on the engine: what is refused and why, the fallback policies, memory, aliases, threads, wide integers."""

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlinfer.errors import GraphFallbackError
from dlinfer.graph.engine import find_engine
from dlinfer.ops.core import fallback
from dlinfer.ops.core.fallback import FallbackWarning
from tests.graph.compiling import compiled, last_report, same_as_eager
from tests.vendor.openvino.lowering import ENGINE, lowered

pytestmark = pytest.mark.usefixtures("graph_mode")
x = torch.randn(4, 6)
WHOLE: dict[str, Any] = {"engine": "openvino", "small_regions": "engine"}


def layer(x):
    return F.gelu(x @ x.t()).softmax(-1) + x.sum()


def test_it_is_found_by_name():
    assert find_engine("openvino", "cpu").name == "openvino"


def test_a_region_is_one_model_for_all_sizes():
    with torch.no_grad():
        run = compiled(layer, dynamic=True, fallback="error", **WHOLE)
        for rows in (4, 5, 9):
            given = torch.randn(rows, 6)
            torch.testing.assert_close(run(given), layer(given), rtol=1e-5, atol=1e-5)
    report = last_report()
    assert [region.engine for region in report.regions] == ["openvino"]
    assert not report.refusals()
    assert report.flops("eager") == 0 < report.flops("engine")


@pytest.mark.parametrize("policy", ["allow", "warn", "error"])
def test_what_is_refused_runs_eagerly_under_the_policy(policy):
    def partly(x):
        return torch.digamma(x.exp()) + x.sin()

    run = compiled(partly, fallback=policy, **WHOLE)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        if policy == "error":
            with pytest.raises(GraphFallbackError, match=r"aten\.digamma.*no lowering"):
                run(x)
            return
        torch.testing.assert_close(run(x), partly(x), rtol=1e-4, atol=1e-5)
    ((op, reason),) = last_report().refusals()
    assert (op, reason) == ("aten.digamma", "the engine has no lowering for aten.digamma")
    assert len([one for one in caught if one.category is FallbackWarning]) == (policy == "warn")


def test_keyword_only_parameters_of_a_lowering_are_given_by_name():
    from dlinfer.vendor.openvino import registry

    def named(b, x, *, keepdim=False, dim=None, unbiased=True): ...

    given = {"self": 1, "dim": 2, "keepdim": True, "dtype": None}
    lowering = registry.Lowering(named, registry.taken, False)
    assert lowering.by_position(given) == [1]
    assert lowering.by_name(given) == {"dim": 2, "keepdim": True}
    lowering = registry.Lowering(lambda b, *values: None, registry.taken, False)
    assert (lowering.by_position(given), lowering.by_name(given)) == ([1, 2, True, None], {})


def test_a_region_that_a_lowering_cannot_take_runs_eagerly(monkeypatch):
    from dlinfer.vendor.openvino import registry

    def fails(b, x):
        raise RuntimeError("no such thing")

    broken = registry.Lowering(fails, lambda call: None, True)
    monkeypatch.setitem(registry._table, torch.ops.aten.sin.default, broken)
    with torch.no_grad():
        torch.testing.assert_close(compiled(lambda x: x.sin() + 1, **WHOLE)(x), x.sin() + 1)
        reasons = {node.op: node.reason for node in last_report().placed("eager")}
        assert reasons == {
            "aten.sin": "OpenVINO: RuntimeError: no such thing",
            "aten.add.Tensor": "sin: OpenVINO: RuntimeError: no such thing",
        }
        with pytest.raises(GraphFallbackError, match="no such thing"):
            compiled(lambda x: x.sin() + 2, fallback="error", **WHOLE)(x)


def test_a_lowering_of_another_type_or_rank_is_found(monkeypatch):
    from dlinfer.vendor.openvino import registry

    wrong = registry.Lowering(
        lambda b, x: b.cast(x, registry.dtypes.type_of(torch.int32)), lambda call: None, True
    )
    monkeypatch.setitem(registry._table, torch.ops.aten.sin.default, wrong)
    with torch.no_grad():
        torch.testing.assert_close(compiled(lambda x: x.sin() + 1, **WHOLE)(x), x.sin() + 1)
    assert any("OpenVINO changes its dtype to i32" in node.reason for node in last_report().placed("eager"))


def test_small_regions_stay_eager():
    with torch.no_grad():
        compiled(lambda x: x.sin() + 1, engine="openvino")(x)
        (reason,) = {node.reason for node in last_report().placed("eager")}
        assert "costs less than entering" in reason
        compiled(lambda x: (x @ x.t()).sin(), engine="openvino")(x)
        assert not last_report().placed("eager")


# --- memory


def writes(x, y):
    x.mul_(2)
    y[1:3] = x[:2] + 1
    x.add_(y)
    return x.sum(0), y, x.t(), y * 2


def views(x, y):
    wide = x @ y.t()
    return wide, wide[0], wide.view(-1), x, x[1:], (x + 0).t()


def in_both_places(x, y):
    y.copy_(x.sin())
    x.add_(y)
    return torch.digamma(x.abs() + 1), x + y


def exchanged(x, y):
    before = x.clone()
    x.copy_(y)
    y.copy_(before)
    return (x - y).sin()


def exchanged_rows(x, y):
    before = x.clone()
    x[1:3] = y[1:3]
    y.index_copy_(0, torch.arange(4), before)
    return (x - y).sin()


@pytest.mark.parametrize("function", [writes, views, in_both_places, exchanged, exchanged_rows])
def test_writes_and_aliases_are_what_eager_makes_of_them(function):
    same_as_eager(function, x, x * 2 + 1, **WHOLE)


def test_inputs_that_share_memory_run_eagerly_at_that_call():
    def write(x, y):
        x.add_(1)
        return (x @ y.t()).sin()

    run, _ = lowered(write, torch.randn(4, 6), torch.randn(4, 6), fallback="allow")
    both = torch.randn(8, 6)
    for one, other in ((both[:4], both[4:]), (both[:4], both[2:6])):
        ours, theirs = both.clone(), both.clone()
        start, begin = one.storage_offset(), other.storage_offset()
        given = [ours.as_strided((4, 6), (6, 1), place) for place in (start, begin)]
        expected = [theirs.as_strided((4, 6), (6, 1), place) for place in (start, begin)]
        torch.testing.assert_close(run(*given)[0], write(*expected))
        torch.testing.assert_close(ours, theirs)
    assert [kind.reason for kind in fallback.counts()] == ["inputs 0 and 1 share memory that is written"]


def test_a_written_input_whose_elements_share_memory_runs_eagerly_at_that_call():
    def write(x, slots, y):
        x.index_put_((slots,), y)
        return y * 2

    slots, y = torch.tensor([1, 1]), torch.ones(2, 6)
    run, _ = lowered(write, torch.zeros(4, 6), slots, y, fallback="allow")
    expanded = torch.zeros(1, 6).expand(4, 6)
    torch.testing.assert_close(run(expanded, slots, y)[0], y * 2)
    torch.testing.assert_close(expanded, torch.ones(4, 6))
    assert [kind.reason for kind in fallback.counts()] == [
        "input 0 is written, but some of its elements share memory"
    ]


def test_inputs_that_are_not_contiguous():
    run, _ = lowered(lambda x: (x @ x.t()).sin(), torch.randn(6, 4).t())
    given = torch.randn(6, 9).t()
    torch.testing.assert_close(run(given)[0], (given @ given.t()).sin(), rtol=1e-4, atol=1e-5)


def test_results_are_the_caller_s_own():
    run, _ = lowered(layer, x)
    first = run(x)[0]
    kept = first.clone()
    run(torch.randn(4, 6))
    assert torch.equal(first, kept)


def test_a_request_keeps_no_tensor_alive():
    import weakref

    run, _ = lowered(layer, x)
    given = torch.randn(4, 6)
    gone = weakref.ref(given)
    run(given)
    del given
    assert gone() is None


# --- integers


def test_integers_beyond_32_bits_run_eagerly_at_that_call():
    def add(ids):
        return (ids + 1) * 2

    ids = torch.arange(6).view(2, 3)
    run, _ = lowered(add, ids, fallback="allow")
    for given in (ids, ids + 2**40, -ids - 2**40, ids):
        assert torch.equal(run(given)[0], add(given))
    (kind,) = fallback.counts()
    assert "more than 32 bits" in kind.reason
    refused, _ = lowered(add, ids)
    with pytest.raises(GraphFallbackError, match="more than 32 bits"):
        refused(ids + 2**40)


# --- threads


def test_threads_run_at_once():
    run, _ = lowered(layer, x)
    inputs = [torch.randn(3 + i, 6) for i in range(8)]
    expected = [layer(one) for one in inputs]
    wrong: list[object] = []

    def work(index):
        for _ in range(60):
            (got,) = run(inputs[index])
            if not torch.allclose(got, expected[index], rtol=1e-5, atol=1e-5):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_engine_says_what_it_is():
    assert ENGINE.identity(Path()).startswith("openvino 20")
    assert not ENGINE.keeps({"anything"})


class AddsToItsArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(20.0).view(4, 5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return (self.weight * 2 + x).sin()


def test_an_argument_that_is_written_is_a_weights_memory_at_some_calls():
    """The weight is built into the model: such a call runs eagerly, and the weight is built in anew after it."""
    ours, theirs = AddsToItsArgument(), AddsToItsArgument()
    run = compiled(ours, **WHOLE)
    with torch.no_grad():
        for own in (True, False, False, True):
            given, expected = (torch.ones(4, 5) if own else one.weight[:] for one in (ours, theirs))
            torch.testing.assert_close(run(given), theirs(expected))
            torch.testing.assert_close(ours.weight, theirs.weight)
    assert sum(fallback.counts().values()) == 2


def test_autocast_does_not_reach_what_runs_while_compiling():
    def write(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        x[row] = 7
        return x

    run = compiled(write, engine="openvino", fallback="error", small_regions="engine")
    x = torch.full((5, 3), 2.0, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.float16):  # with bfloat16 beside it some torch ops raise
        torch.testing.assert_close(run(x.clone(), torch.tensor(4)), write(x.clone(), torch.tensor(4)))
