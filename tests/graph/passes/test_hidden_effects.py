"""Ops that may have effects of their own run as often as the model calls them, and in its order."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dlinfer.errors import PassError
from dlinfer.graph.ir.dialect import has_hidden_effects, is_pure, op_name
from dlinfer.graph.passes.pipeline import Pass, run_passes
from dlinfer.graph.passes.registry import passes
from tests.graph.compiling import StubEngine, ValueEngine, compiled, interpreted_engine, use_engine
from tests.graph.passes.fusion.capturing import captured

pytestmark = pytest.mark.usefixtures("graph_mode")
log: list[str] = []


def _define(name: str, step: float, **options):
    @torch.library.custom_op(f"dlinfer_test::{name}", mutates_args=(), **options)
    def op(x: Tensor) -> Tensor:
        log.append(name)
        return x + step * len(log)

    op.register_fake(torch.empty_like)
    return op


counts, draws = _define("counts", 1.0), _define("draws_noise", 10.0)
tagged = _define("tagged", 1.0, tags=(torch.Tag.pointwise,))


@pytest.fixture(autouse=True)
def empty_log() -> Iterator[None]:
    log.clear()
    yield
    log.clear()


def twice_with_equal_arguments(x):
    return counts(x) + counts(x)


def unused(x):
    counts(x)
    return x * 2


def alternating(x):
    return counts(x) + draws(x * 2) + counts(x * 3) + draws(x * 4)


def around_writes(x):
    y = x * 2
    a = counts(y)
    y.add_(1)
    b = draws(y)
    y.mul_(2)
    return a + b + y + counts(y)


def after_its_reader(x):
    """Level by level, the second one is ready before the first."""
    slow = (x.sin() @ x.t()).cos() @ x
    return counts(slow) + draws(x)


FUNCTIONS = [twice_with_equal_arguments, unused, alternating, around_writes, after_its_reader]


def expected(function, x: Tensor) -> tuple[Tensor, list[str]]:
    log.clear()
    want = function(x.clone())
    order = list(log)
    log.clear()
    return want, order


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("engine", ["inductor", "values", "all", "none", "alternate"])
def test_each_call_runs_once_and_in_order(function, engine, monkeypatch):
    engines = {
        "inductor": lambda: interpreted_engine(monkeypatch),
        "values": lambda: ValueEngine(refused=["dlinfer_test.counts", "dlinfer_test.draws_noise"]),
        "all": StubEngine,
        "none": lambda: StubEngine(refused=["dlinfer_test.counts", "dlinfer_test.draws_noise"]),
        "alternate": lambda: StubEngine(refused=["dlinfer_test.counts"]),
    }
    use_engine(monkeypatch, engines[engine]())
    x = torch.randn(4, 4)
    with torch.no_grad():
        run = compiled(function)
        for _ in range(2):
            want, order = expected(function, x)
            torch.testing.assert_close(run(x.clone()), want)
            assert log == order


def test_what_is_assumed_of_an_op(monkeypatch):
    def function(x):
        return counts(x) + tagged(x) + torch.ops.aten.sin(x)

    graph = captured(function, torch.ones(3)).graph_module.graph
    facts = {op_name(node): (has_hidden_effects(node), is_pure(node)) for node in graph.nodes}
    assert facts["dlinfer_test.counts"] == facts["dlinfer_test.tagged"] == (True, False)
    assert facts["aten.sin"] == (False, True)
    assert facts["placeholder"][0] is False


def test_an_op_of_a_library_without_state_is_merged_unless_torch_knows_of_an_effect(monkeypatch):
    monkeypatch.setattr("dlinfer.graph.ir.dialect._WITHOUT_STATE", frozenset({"dlinfer_test"}))
    graph = captured(twice_with_equal_arguments, torch.ones(3)).graph_module.graph
    (node, _) = graph.find_nodes(op="call_function", target=torch.ops.dlinfer_test.counts.default)
    assert is_pure(node)
    counts.register_effect(torch.library.EffectType.ORDERED)
    try:
        assert not is_pure(node)
    finally:
        counts.register_effect(None)


def _broken(graph_module):
    (first, second) = graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.dlinfer_test.counts.default
    )
    second.replace_all_uses_with(first)
    graph_module.graph.erase_node(second)
    return []


def test_a_pass_that_drops_one_is_refused():
    one = captured(twice_with_equal_arguments, torch.ones(3))
    with pytest.raises(PassError, match=r"ops with effects changed from \[.*counts.*\] to"):
        run_passes(one.graph_module, [Pass("broken", "", _broken)])


def test_the_common_passes_keep_them():
    for function in FUNCTIONS:
        one = captured(function, torch.ones(4, 4))
        before = [op_name(n) for n in one.graph_module.graph.nodes if has_hidden_effects(n)]
        run_passes(one.graph_module, passes())
        assert [op_name(n) for n in one.graph_module.graph.nodes if has_hidden_effects(n)] == before
