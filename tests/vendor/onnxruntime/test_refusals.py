"""What the engine does not take, node by node, each with its reason."""

import pytest
import torch

from dlinfer.graph.engine import Engine
from dlinfer.vendor.onnxruntime.judge import Judge, _kind
from tests.vendor.onnxruntime.regions import ENGINE, refused, subgraph

X = torch.randn


@pytest.mark.parametrize(
    ("function", "values", "op", "reason"),
    [
        (lambda x: x + 1, (X(3, 4).bfloat16(),), "aten.add.Tensor", "bfloat16"),
        (lambda x: x.to(torch.bfloat16), (X(3, 4),), "aten.to.dtype", "bfloat16"),
        (lambda x: x * x, (X(3, 4).to(torch.complex64),), "aten.mul.Tensor", "complex64 is no type"),
        (lambda x: torch.rand_like(x) + x, (X(3, 4),), "aten.rand_like.default", "random generator"),
        (lambda x: x.nonzero(), (X(3, 4),), "aten.nonzero.default", "a size that only the data tells"),
        (lambda x: x[x > 0], (X(3, 4),), "aten.index.Tensor", "a size that only the data tells"),
        (lambda x: torch.linalg.svdvals(x), (X(3, 4),), "aten.linalg_svdvals.default", "translation to ONNX"),
        (lambda x: torch.bitwise_xor(x, x), (torch.tensor([1, 2], dtype=torch.uint16),), "aten.bitwise_xor.Tensor", ""),
    ],
)
def test_a_node_is_refused_with_the_reason(function, values, op, reason):
    found = refused(subgraph(function, *values))
    assert op in found, found
    assert reason in found[op]


def test_a_kernel_that_onnx_runtime_lacks_is_its_own_reason():
    """float64 has no Erf kernel on ONNX Runtime's CPU: the session itself says so."""
    found = refused(subgraph(lambda x: torch.special.i0(x) + x.digamma(), X(3, 4)))
    assert all(reason for reason in found.values())
    assert found


def test_layers_that_are_alike_are_judged_once(monkeypatch):
    judge, asked = Judge(), []
    monkeypatch.setattr("dlinfer.vendor.onnxruntime.judge._tried", lambda node: asked.append(node))
    region = subgraph(lambda x, y: (x @ y.t(), y @ x.t(), x @ x.t()), X(3, 4), X(3, 4))
    for node in region.graph_module.graph.nodes:
        judge.refuses(node)
    products = [node for node in asked if "matmul" in str(node.target)]
    assert len(products) == 1 + ("mm" in str(products)) * 0


def test_kinds_differ_in_sizes_and_dtypes_but_not_in_names():
    def kind(function, *values):
        nodes = subgraph(function, *values).graph_module.graph.nodes
        return _kind(next(node for node in nodes if node.op == "call_function"))

    assert kind(lambda a: a + 1, X(3, 4)) == kind(lambda b: b + 1, X(7, 9))
    assert kind(lambda a: a + 1, X(3, 4)) != kind(lambda a: a + 2, X(3, 4))
    assert kind(lambda a: a + 1, X(3, 4)) != kind(lambda a: a + 1, X(3, 4).double())
    assert kind(lambda a, b: a + b, X(3, 4), X(3, 4)) != kind(lambda a, b: a + b, X(3, 4), X(1, 4))


def test_small_regions_cost_more_than_they_save():
    nodes = subgraph(lambda x: torch.relu(x) + 1, X(3, 4)).graph_module.graph.find_nodes(op="call_function")
    assert "too few" in str(ENGINE.entry_cost(list(nodes)))
    nodes = subgraph(lambda x: x.sin().cos().exp().tanh(), X(3, 4)).graph_module.graph.nodes
    assert ENGINE.entry_cost([node for node in nodes if node.op == "call_function"]) is None


def test_it_is_an_engine_whose_sessions_are_not_stored(tmp_path):
    engine: Engine = ENGINE
    assert not engine.keeps({"anything"})
    assert engine.keeps(set())
    assert "onnxruntime 1" in engine.identity(tmp_path)
    with pytest.raises(LookupError):
        engine.restore({"anything"}, tmp_path)
    with pytest.raises(KeyError):
        engine.resolve("anything")
