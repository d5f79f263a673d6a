"""Which nodes have a place in an ONNX model, asked of each node alone."""

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")

from torch import fx

from dlinfer.graph.onnx import refusal as module
from dlinfer.graph.onnx.refusal import refusal

aten = torch.ops.aten


def node_of(op, *shapes: tuple[int, ...], extra: tuple = (), dtype: torch.dtype = torch.float32) -> fx.Node:
    graph = fx.Graph()
    with FakeTensorMode():
        fakes = [torch.empty(shape, dtype=dtype) for shape in shapes]
        value = op(*fakes, *extra)
    inputs = []
    for index, fake in enumerate(fakes):
        inputs.append(graph.placeholder(f"x{index}"))
        inputs[-1].meta["val"] = fake
    node = graph.call_function(op, (*inputs, *extra))
    node.meta["val"] = value
    return node


@pytest.mark.parametrize(
    "node",
    [
        node_of(aten.add.Tensor, (2, 3), (3,)),
        node_of(aten.linear.default, (2, 3), (4, 3)),
        node_of(aten.split.Tensor, (4, 3), extra=(2,)),  # a list of results
        node_of(aten.topk.default, (4, 3), extra=(2,)),
        node_of(aten.diff.default, (4,)),  # by its decomposition
    ],
    ids=str,
)
def test_an_op_with_a_translation_or_a_decomposition_is_taken(node):
    assert refusal(node) is None


def test_an_op_without_either_is_refused_with_the_reason():
    assert "translation to ONNX" in str(refusal(node_of(aten.linalg_svd.default, (3, 3))))


def test_a_translation_that_the_standard_does_not_allow_is_refused(monkeypatch):
    from onnxscript import opset18

    def bitwise_of_floats(x, y):
        return opset18.BitwiseAnd(x, y)

    reason = refusal(
        node_of(aten.add.Tensor, (2,), (2,)), translations=lambda: {aten.add.Tensor: bitwise_of_floats}
    )
    assert "no valid ONNX" in str(reason)


def test_one_result_of_a_node_goes_with_it():
    for op, taken in ((aten.topk.default, True), (aten._linalg_svd.default, False)):
        whole = node_of(op, (3, 3), extra=(2,) if taken else ())
        part = whole.graph.call_function(operator.getitem, (whole, 0))
        part.meta["val"] = whole.meta["val"][0]
        assert (refusal(part) is None) == taken


def test_an_assertion_is_left_out_of_a_model():
    graph = fx.Graph()
    condition = graph.placeholder("x")
    with FakeTensorMode():
        condition.meta["val"] = torch.empty((), dtype=torch.bool)
    node = graph.call_function(aten._assert_async.default, (condition,))
    node.meta["val"] = None
    assert refusal(node) is None


def test_inputs_and_constants_are_no_matter():
    graph = fx.Graph()
    assert refusal(graph.placeholder("x")) is None
    assert refusal(graph.get_attr("weight")) is None


def test_equal_calls_are_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "_tried", lambda node, *rest: tried.append(node.name))
    for _ in range(2):
        refusal(node_of(aten.add.Tensor, (2, 3), (3,)))
    refusal(node_of(aten.add.Tensor, (2, 3), (1,)))
    refusal(node_of(aten.add.Tensor, (2, 3), (3,), dtype=torch.int64))
    refusal(node_of(aten.sub.Tensor, (2, 3), (3,)))
    assert len(tried) == 4
