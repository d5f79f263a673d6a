"""An engine of values, whose vendor is torch: what is refused, what a call checks, and what torch runs in its place."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode

from dlinfer.errors import EngineResultError, GraphFallbackError, GraphRunError
from dlinfer.graph.engine import EngineCompileError
from dlinfer.graph.engine_kit.options import EngineOptions
from dlinfer.graph.engine_kit.refused import RefusedError, WrongInputError
from dlinfer.graph.engine_kit.value_engine import ValueEngine
from dlinfer.graph.engine_kit.value_region import Executable, Lowered
from dlinfer.ops.core import fallback
from tests.graph.compiling import compiled, last_report, same_as_eager, use_engine

pytestmark = pytest.mark.usefixtures("graph_mode")
aten = torch.ops.aten


class ByTorch(Lowered):
    """Runs the function's graph; ``engine`` may spoil each step."""

    source = "by torch"

    def __init__(self, engine: "TorchEngine", function) -> None:
        super().__init__(function, function.weights)
        self.engine = engine

    def compile(self, weights: tuple[torch.Tensor, ...]) -> Executable:
        self.engine.builds += 1
        if self.engine.compiles is not None:
            raise RefusedError(self.engine.compiles)
        if self.engine.fault is not None:
            raise self.engine.fault
        held = dict(zip(self.held, (one.clone() for one in weights), strict=True))

        def run(*inputs: Any) -> Sequence[torch.Tensor]:
            given = [held.get(index, value) for index, value in enumerate(inputs)]
            made = self.function.graph_module(*given)
            return self.engine.spoil([one.clone(memory_format=torch.contiguous_format) for one in made])

        return run

    def check(self, inputs: Sequence[Any]) -> None:
        if self.engine.refused_call is not None:
            raise self.engine.refused_call


class TorchEngine(ValueEngine[EngineOptions]):
    name = "torch"
    options_type = EngineOptions

    def __init__(self) -> None:
        self.lowers: RefusedError | None = None
        self.compiles: str | None = None
        self.fault: Exception | None = None
        self.refused_call: Exception | None = None
        self.builds = 0
        self.spoil: Any = lambda values: values

    def refuses_op(self, node: fx.Node) -> str | None:
        return "no sine" if node.target == aten.sin.default else None

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        return "complex" if dtype.is_complex else None

    def lower(self, function, options: EngineOptions, policy: str) -> Lowered:
        if self.lowers is not None:
            raise self.lowers
        return ByTorch(self, function)


@pytest.fixture
def vendor(monkeypatch) -> TorchEngine:
    made = TorchEngine()
    use_engine(monkeypatch, made)
    return made


x = torch.randn(4, 6)


def layer(x, weight, bias):
    return F.linear(x, weight, bias).relu()


def test_writes_views_and_aliases(vendor):
    def function(x, y):
        x.mul_(2)
        y[1:3] = x[:2] + 1
        x.add_(y)
        return x.sum(0), y, x.t(), x.exp()[1:]

    same_as_eager(function, x, x * 2 + 1, fallback="error")
    assert {node.place for node in last_report().nodes} <= {"engine", "view", "size"}


def test_a_function_that_computes_nothing_is_views(vendor):
    def function(x):
        return x.t()[1:], x.view(-1)

    same_as_eager(function, x, small_regions="engine")


def test_weights_are_built_in_and_again_when_they_change(vendor):
    model = nn.Linear(6, 3).eval()
    run = compiled(model, fallback="error")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x))
        assert vendor.builds == 1
        model.weight.mul_(2)
        torch.testing.assert_close(run(x), model(x))
    assert vendor.builds == 2
    assert any("weights changed: " in note for note in last_report().regions[0].notes)


class InPlace(ByTorch):
    """Writes new contents of inputs itself, below torch, as runtimes do that are bound to an input's memory."""

    def compile(self, weights: tuple[torch.Tensor, ...]) -> Executable:
        compute = super().compile(weights)

        def run(*inputs: Any) -> Sequence[torch.Tensor]:
            values = list(compute(*inputs))
            for index, target in enumerate(self.function.writes):
                if target is not None:
                    inputs[target].numpy()[...] = values[index].numpy()
                    values[index] = inputs[target]
            return values

        return run


def test_what_the_vendor_writes_itself_counts(vendor, monkeypatch):
    monkeypatch.setattr(vendor, "lower", lambda function, options, policy: InPlace(vendor, function))

    def function(x, y):
        y.mul_(2)
        return x + y

    a, b = x.clone(), x.clone()
    with torch.no_grad():
        run = compiled(function, fallback="error")
        torch.testing.assert_close(run(a, b), x + x * 2)
    assert (a._version, b._version) == (0, 1)


# --- results that are not the graph's


@pytest.mark.parametrize(
    ("spoil", "given"),
    [
        (lambda values: [one.double() for one in values], r"torch\.float64 \[4, 6\]"),
        (lambda values: [one[None] for one in values], r"torch\.float32 \[1, 4, 6\]"),
        (lambda values: [one[:3] for one in values], r"torch\.float32 \[3, 6\]"),
        (lambda values: [one.to("meta") for one in values], r"torch\.float32 \[4, 6\] on meta"),
        (lambda values: [], "0 results"),
    ],
)
def test_a_result_of_another_dtype_rank_size_or_device_is_an_error_and_nothing_is_written(
    vendor, spoil, given
):
    def function(x):
        x.add_(1)
        return x.exp()

    run, data = compiled(function, fallback="error"), x.clone()
    vendor.spoil = spoil
    with torch.no_grad(), pytest.raises((EngineResultError, GraphRunError), match=given):
        run(data)
    assert torch.equal(data, x)


# --- what torch runs in its place


def test_a_region_that_is_not_lowered_names_its_node(vendor):
    vendor.lowers = RefusedError("too large", "relu")
    with torch.no_grad():
        run = compiled(lambda x: (x + 1).relu(), fallback="allow")
        torch.testing.assert_close(run(x), (x + 1).relu())
        reasons = {node.op: node.reason for node in last_report().placed("eager")}
        assert reasons == {"aten.add.Tensor": "relu: too large", "aten.relu": "too large"}
        with pytest.raises(GraphFallbackError, match=r"aten\.relu.*too large"):
            compiled(lambda x: (x + 2).relu(), fallback="error")(x)


def test_what_is_not_compiled_with_its_weights_is_tried_once_for_them(vendor):
    model = nn.Linear(6, 3).eval()
    vendor.compiles = "no memory"
    with torch.no_grad():
        run = compiled(model, fallback="allow")
        for _ in range(3):
            torch.testing.assert_close(run(x), model(x))
        assert (vendor.builds, last_report().regions[0].notes) == (1, ["torch ran a call instead: no memory"])
        assert sum(fallback.counts().values()) == 3
        vendor.compiles = None
        model.weight.mul_(2)
        torch.testing.assert_close(run(x), model(x))
        assert (vendor.builds, sum(fallback.counts().values())) == (2, 3)


def test_a_call_that_is_refused_runs_by_torch_under_the_policy(vendor):
    run, strict = (compiled(lambda x: x.exp() + 1, fallback=policy) for policy in ("allow", "error"))
    with torch.no_grad():
        run(x)
        strict(x)
        vendor.refused_call = RefusedError("too long")
        torch.testing.assert_close(run(x), x.exp() + 1)
        assert [kind.reason for kind in fallback.counts()] == ["too long"]
        with pytest.raises(GraphFallbackError, match="too long"):
            strict(x)
        vendor.refused_call = None
        torch.testing.assert_close(strict(x), x.exp() + 1)


def test_wrong_inputs_are_torchs_to_refuse_and_no_fallback(vendor):
    run = compiled(lambda x, rows: x[rows] + 1, fallback="error")
    vendor.refused_call = WrongInputError("rows")
    with torch.no_grad(), pytest.raises(Exception, match="out of"):
        run(x, torch.tensor([0, 9]))
    assert not fallback.counts()


def test_inputs_that_share_written_memory_run_by_torch(vendor):
    def function(cache, other):
        cache.add_(1)
        return other * 2

    memory = torch.randn(9, 4)
    expected = memory.clone()
    run = compiled(function, fallback="allow", dynamic=False)
    with torch.no_grad():
        run(torch.randn(4, 4), torch.randn(4, 4))
        for start, shares in ((5, False), (1, True), (5, False), (1, True), (0, True)):
            counted = sum(fallback.counts().values())
            result = run(memory[:4], memory[start : start + 4])
            torch.testing.assert_close(result, function(expected[:4], expected[start : start + 4]))
            torch.testing.assert_close(memory, expected)
            if start:  # Dynamo compiles anew for a tensor that is given twice
                assert sum(fallback.counts().values()) - counted == shares


# --- which nodes are taken


def node_of(op: Any, value: torch.Tensor, result: Any = None) -> fx.Node:
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = value
    node = graph.call_function(op, (given,))
    with torch.no_grad():
        node.meta["val"] = op(value) if result is None else result
    return node


def test_the_vendors_reason_comes_last():
    engine = TorchEngine()
    with FakeTensorMode():
        real, other = torch.empty(3), torch.empty(3, dtype=torch.complex64)
        flag = torch.empty((), dtype=torch.bool)
    assert engine.refuses(node_of(aten.cos.default, real)) is None
    assert engine.refuses(node_of(aten.sin.default, real)) == "no sine"
    assert engine.refuses(node_of(aten.sin.default, other)) == "complex"
    assert engine.refuses(node_of(aten.real.default, other, real)) == "complex"  # what it takes
    assert (
        engine.refuses(node_of(aten.cos.default, torch.empty(3, device="meta")))
        == "it uses a tensor on device 'meta'"
    )
    sparse = torch.eye(3).to_sparse()
    assert (
        engine.refuses(node_of(aten.cos.default, sparse, sparse))
        == "it uses a tensor of layout torch.sparse_coo"
    )
    assert "random" in str(engine.refuses(node_of(aten.rand_like.default, real)))
    check = node_of(aten._assert_async.default, flag, ())
    check.meta["val"] = None
    assert engine.refuses(check) is None
    assert engine.refuses(check.all_input_nodes[0]) is None


def test_writes_are_refused_where_the_vendor_says_so():
    engine = TorchEngine()
    with FakeTensorMode():
        node = node_of(aten.relu_.default, torch.empty(3))
    assert engine.refuses(node) is None
    engine.refuses_writes = "it writes"
    assert engine.refuses(node) == "it writes"


def test_one_result_of_a_node_goes_with_it():
    import operator

    engine = TorchEngine()
    engine.refuses_op = lambda node: "no topk" if node.target == aten.topk.default else None
    with FakeTensorMode():
        whole = node_of(lambda value: aten.topk.default(value, 2), torch.empty(3))
    whole.target = aten.topk.default
    part = whole.graph.call_function(operator.getitem, (whole, 0))
    part.meta["val"] = whole.meta["val"][0]
    assert engine.refuses(part) == "no topk"


def test_small_regions_are_not_worth_entering(vendor):
    vendor.smallest = 3
    with torch.no_grad():
        compiled(lambda x: x.cos() + 1, fallback="error")(x)
        (reason,) = {node.reason for node in last_report().placed("eager")}
        assert reason == "running 2 nodes eagerly costs less than entering torch"
        vendor.is_heavy = lambda node: node.target == aten.cos.default
        compiled(lambda x: x.cos() + 2, fallback="error")(x)
        assert not last_report().placed("eager")


@pytest.mark.parametrize(
    "function", [nn.Linear(6, 3).eval(), lambda x: x.cos() * 2], ids=["weights", "no weights"]
)
def test_an_engine_that_raises_while_it_compiles_is_named(vendor, function):
    vendor.fault = ValueError("the compiler ended with status 139.\nmore")
    with torch.no_grad(), pytest.raises((EngineCompileError, BackendCompilerFailed)) as raised:
        compiled(function)(x)
    said = "graph engine 'torch' failed to compile region_0: ValueError: the compiler ended with status 139. Next step"
    assert said in str(raised.value)


def test_an_engine_that_raises_in_a_call_is_named(vendor):
    def spoil(values):
        raise ValueError("device lost")

    vendor.spoil = spoil
    with pytest.raises(GraphRunError, match=r"region region_0 of engine 'torch'.* ValueError: device lost"):
        compiled(lambda x: x.cos() * 2)(x)
