"""Capture: coarse nodes, symbolic sizes, folded and guarded scalars, writes in place, the model's line, refusals."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dlinfer.errors import CaptureError
from dlinfer.graph.capture.trace import capture, trace
from dlinfer.graph.ir.dialect import fake, model_line, op_name, written_arguments
from dlinfer.graph.report import report
from dlinfer.graph.torch_private import fake_mode
from dlinfer.ops.core import spec
from dlinfer.ops.core.samples import SampleMaker
from tests.graph.compiling import StubEngine, compiled, use_engine
from tests.graph.passes.fusion.capturing import captured

pytestmark = pytest.mark.usefixtures("graph_mode")


def ops(function, *args, **kwargs) -> list[str]:
    graph = captured(function, *args, **kwargs).graph_module.graph
    return [op_name(node) for node in graph.nodes if node.op == "call_function"]


x = torch.randn(3, 8)
COARSE = {
    "aten.linear": (F.linear, x, torch.randn(4, 8)),
    "aten.layer_norm": (lambda x, w: F.layer_norm(x, (8,), w), x, torch.ones(8)),
    "aten.silu": (F.silu, x),
    "aten.gelu": (F.gelu, x),
    "aten.softmax.int": (lambda x: F.softmax(x, -1), x),
    "aten.embedding": (F.embedding, torch.tensor([1, 2]), torch.randn(4, 8)),
    "aten.scaled_dot_product_attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        torch.randn(1, 2, 3, 8),
    ),
    "aten.rms_norm": (lambda x: F.rms_norm(x, (8,)), x),
    "aten.batch_norm": (F.batch_norm, x, torch.zeros(8), torch.ones(8)),
    "aten.einsum": (lambda x: torch.einsum("ij,kj->ik", x, x), x),
}


@pytest.mark.parametrize("name", COARSE)
def test_layers_stay_one_node(name):
    function, *args = COARSE[name]
    computing = [op for op in ops(function, *args) if not op.startswith("aten.sym_")]
    assert computing == [name]


@pytest.mark.parametrize("name", spec.registry())
def test_dlinfer_ops_stay_one_node(name):
    op = spec.registry()[name]
    sample = next(iter(op.sample_inputs(SampleMaker(torch.float32))))

    def model(*args):
        return op.overload(*args)

    computing = [called for called in ops(model, *sample.args) if "getitem" not in called]
    assert computing == [f"dlinfer.{name}"]


def test_sizes_are_symbolic_and_one_graph_serves_them():
    one = captured(lambda x: x.reshape(x.shape[0] * 2, -1) + x.shape[1], torch.ones(4, 6))
    (placeholder, *_) = one.graph_module.graph.find_nodes(op="placeholder")
    values = [fake(node) for node in one.graph_module.graph.find_nodes(op="placeholder")]
    (tensor,) = [value for value in values if isinstance(value, torch.Tensor)]
    assert all(isinstance(size, torch.SymInt) for size in tensor.shape), placeholder
    given = [torch.ones(5, 8) if isinstance(value, torch.Tensor) else value for value in values]
    names = {str(size): number for size, number in zip(tensor.shape, (5, 8), strict=True)}
    given = [
        names.get(str(value), value) if not isinstance(value, torch.Tensor) else value for value in given
    ]
    torch.testing.assert_close(one.graph_module(*given)[0], torch.full((10, 4), 9.0))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    ("model", "attribute", "values", "graphs"),
    [(nn.LayerNorm(8), "eps", (1e-5, 0.5, 1e-5, 2.0), 3), (Scaled(), "scale", (0.5, 3.0, -0.0, 0.5), 2)],
    ids=["LayerNorm.eps", "a scale"],
)
def test_module_floats_are_folded_and_guarded_until_arithmetic_with_one_changes(
    model, attribute, values, graphs, monkeypatch
):
    use_engine(monkeypatch, StubEngine())
    run = compiled(model)
    for value in values:
        setattr(model, attribute, value)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))
    assert len(report.reports()) == graphs, "once for each distinct value, or for the first and all others"
    assert "aten.item" not in report.reports()[0].captured


def written(cache, x):
    cache[:, 2:4] = x
    cache[0].add_(1)
    return cache.sum()


def test_writes_stay_in_place(monkeypatch):
    one = captured(written, torch.zeros(3, 6), torch.ones(3, 2))
    nodes = one.graph_module.graph.nodes
    assert [op_name(node) for node in nodes if written_arguments(node)] == ["aten.copy_", "aten.add_.Tensor"]
    use_engine(monkeypatch, StubEngine())
    cache = torch.zeros(3, 6)
    address = cache.data_ptr()
    with torch.no_grad():
        compiled(written)(cache, torch.ones(3, 2))
    assert cache.data_ptr() == address
    assert cache.sum() == 12


def test_every_node_tells_the_models_line():
    def model(x):
        y = F.silu(x)
        z = y.view(-1)
        z[0] = 1
        return z * 2

    nodes = [n for n in captured(model, x).graph_module.graph.nodes if n.op == "call_function"]
    first = model.__code__.co_firstlineno
    for node in nodes:
        path, line = model_line(node).split(", in ")[0].rsplit(":", 1)
        assert path == __file__
        assert first < int(line) <= first + 4
        assert model_line(node).endswith(", in model")
    silu = next(node for node in nodes if op_name(node) == "aten.silu")
    assert model_line(silu) == f"{__file__}:{first + 1}, in model"


def test_nodes_of_modules_tell_their_module():
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
    nodes = captured(model, x).graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.silu.default
    )
    (stack,) = [list(node.meta["nn_module_stack"].values())[-1] for node in nodes]
    assert stack[1] is nn.SiLU or "SiLU" in str(stack[1])


@torch.library.custom_op("dlinfer_test::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def captured_directly(function, *args):
    """Capture a graph that Dynamo did not make."""
    mode = fake_mode.fresh_mode()
    fakes = [mode.from_tensor(arg) for arg in args]
    return trace(function, fakes, mode)


def test_what_an_ops_fake_refuses_is_told_with_its_reason():
    def model(x):
        return without_fake(x) + 1

    with pytest.raises(CaptureError, match=r"without_fake.*at an unknown line"):
        captured_directly(model, x)


def test_what_an_ops_fake_refuses_is_told_with_the_models_line():
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    node = graph.call_function(torch.ops.dlinfer_test.without_fake.default, (given,))
    node.stack_trace = 'File "model.py", line 12, in forward\n    y = without_fake(x)'
    graph.output((node,))
    mode = fake_mode.fresh_mode()
    with pytest.raises(CaptureError, match=r"at model.py:12, in forward"):
        capture(torch.fx.GraphModule({}, graph), [mode.from_tensor(x)], mode)


def test_a_fake_that_torch_did_not_record_is_no_constant():
    def model(x):
        return torch._C._autograd._get_data_attr(x) + 1  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.raises(CaptureError, match="computes without recording how"):
        captured_directly(model, x)


def test_sparse_fakes_are_refused():
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(CaptureError, match=r"layout torch.sparse_coo"):
        capture(torch.fx.GraphModule({}, graph), [x.to_sparse()], fake_mode.fresh_mode())


def test_autocast_is_captured_below_dispatch():
    def mixed(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w)

    w = torch.randn(4, 8)
    one = captured(mixed, x, w)
    assert "aten.linear" not in [op_name(node) for node in one.graph_module.graph.nodes]
    assert one.run()[0].dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(one.run()[0], mixed(x, w))


def test_switches_of_gradients_are_no_part_of_a_graph():
    """Neither those of the function, nor those of a generator that is collected while it is traced."""

    def holds():
        with torch.no_grad():
            yield

    def function(x):
        held = holds()
        next(held)
        with torch.enable_grad():
            y = x + 1
        del held
        return y * 2

    mode = fake_mode.fresh_mode()
    graph = trace(function, [mode.from_tensor(torch.ones(3))], mode).graph_module.graph
    assert [op_name(node) for node in graph.nodes if node.op == "call_function"] == [
        "aten.add.Tensor",
        "aten.mul.Tensor",
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.tensor([x.shape[0], x.shape[1]]) + 1,
        lambda x: torch.tensor([[x.shape[0] / 2], [1.0]]) + 1,
        lambda x: torch.tensor([x.mean(), x.sum()]) * 2,
    ],
    ids=["sizes", "floats of sizes", "results"],
)
def test_a_tensor_of_numbers_that_change(function, monkeypatch):
    """torch asks for the common dtype of the numbers, which gives no value of the graph."""
    use_engine(monkeypatch, StubEngine())
    run = compiled(function, fallback="error")
    with torch.no_grad():
        for rows in (3, 4, 6, 6):
            given = torch.randn(rows, 5)
            torch.testing.assert_close(run(given), function(given))
    assert len(report.reports()) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_part_is_captured_with_the_rest(reentrant, monkeypatch):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            part = checkpoint(lambda y: torch.relu(self.first(y)) * 2, x, use_reentrant=reentrant)
            return self.second(part) + 1

    use_engine(monkeypatch, StubEngine())
    module, given = Checkpointed(), torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(module, fallback="error")(given), module(given))
    (found,) = report.reports()
    assert [node.op for node in found.nodes].count("aten.linear") == 2
