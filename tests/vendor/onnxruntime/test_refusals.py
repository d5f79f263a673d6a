"""What the engine does not take, node by node, each with its reason."""

import pytest
import torch

from dlinfer.graph.engine import Engine
from dlinfer.graph.onnx.support import Refusals, kind
from tests.vendor.onnxruntime.regions import ENGINE, refused, subgraph

X = torch.randn


@pytest.mark.parametrize(
    ("function", "values", "op", "reason"),
    [
        (lambda x: x + 1, (X(3, 4).bfloat16(),), "aten.add.Tensor", "bfloat16"),
        (lambda x: x.to(torch.bfloat16), (X(3, 4),), "aten.to.dtype", "bfloat16"),
        (
            lambda x: x * x,
            (X(3, 4).to(torch.complex64),),
            "aten.mul.Tensor",
            "ONNX tensors cannot have the dtype complex64",
        ),
        (lambda x: torch.rand_like(x) + x, (X(3, 4),), "aten.rand_like.default", "random generator"),
        (lambda x: x.nonzero(), (X(3, 4),), "aten.nonzero.default", "it has a data-dependent size"),
        (lambda x: x[x > 0], (X(3, 4),), "aten.index.Tensor", "it has a data-dependent size"),
        (torch.linalg.svdvals, (X(3, 4),), "aten.linalg_svdvals.default", "translation to ONNX"),
    ],
)
def test_a_node_is_refused_with_the_reason(function, values, op, reason):
    found = refused(subgraph(function, *values))
    assert op in found, found
    assert reason in found[op]


def test_a_kernel_that_onnx_runtime_lacks_is_its_own_reason():
    """float64 has no Erf kernel on ONNX Runtime's CPU: the session itself says so."""
    found = refused(subgraph(torch.erf, X(3, 4).double()))
    assert "Could not find an implementation" in found["aten.erf.default"]


def test_layers_that_are_alike_are_judged_once():
    asked = []
    refusals = Refusals(fault=asked.append)
    region = subgraph(lambda x, y: (x @ y.t(), y @ x.t(), (x + 0) @ (y + 0).t()), X(3, 4), X(3, 4))
    products = [node for node in region.graph_module.graph.nodes if "matmul" in str(node.target)]
    for node in products:
        refusals.of(node)
    assert (len(products), len(asked)) == (3, 1)


def test_kinds_do_not_tell_names_of_nodes_and_sizes_apart():
    def of(function, *values):
        nodes = subgraph(function, *values).graph_module.graph.nodes
        return kind(next(node for node in nodes if node.op == "call_function"))

    assert of(lambda a: a + 1, X(3, 4)) == of(lambda b: b + 1, X(7, 9))
    assert of(lambda a, b: a + b, X(3, 4), X(3, 4)) != of(lambda a, b: a + b, X(3, 4), X(1, 4))


def test_small_regions_cost_more_than_they_save():
    def cost(function):
        nodes = subgraph(function, X(3, 4)).graph_module.graph.nodes
        return ENGINE.entry_cost([node for node in nodes if node.op == "call_function"])

    assert "costs less than entering" in str(cost(lambda x: torch.relu(x) + 1))
    assert cost(lambda x: x.sin().cos().exp().tanh()) is None


def test_it_is_an_engine_whose_sessions_are_not_stored(tmp_path):
    engine: Engine = ENGINE
    assert "onnxruntime 1" in engine.identity(tmp_path)
    engine.restore({"op aten.add.Tensor"}, tmp_path)  # steps of regions that were given back to torch
    assert engine.keeps({"op aten.add.Tensor"})
    assert engine.resolve("op aten.add.Tensor") is torch.ops.aten.add.Tensor
