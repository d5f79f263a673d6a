"""Which nodes have a place in an ONNX model, asked of each node alone."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")

from torch import fx

from dlinfer.graph.onnx.support import Refusals, kind, no_type_of_onnx

refusal = Refusals().of

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


def test_a_translation_that_the_standard_does_not_allow_is_refused():
    from onnxscript import opset18

    def bitwise_of_floats(x, y):
        return opset18.BitwiseAnd(x, y)

    refusals = Refusals(translations=lambda: {aten.add.Tensor: bitwise_of_floats})
    reason = refusals.of(node_of(aten.add.Tensor, (2,), (2,)))
    assert "not valid ONNX" in str(reason)


def test_equal_calls_are_tried_once():
    tried = []
    refusals = Refusals(fault=tried.append)
    for _ in range(2):
        refusals.of(node_of(aten.add.Tensor, (2, 3), (3,)))
    refusals.of(node_of(aten.add.Tensor, (2, 3), (1,)))
    refusals.of(node_of(aten.add.Tensor, (2, 3), (3,), dtype=torch.int64))
    refusals.of(node_of(aten.sub.Tensor, (2, 3), (3,)))
    assert len(tried) == 4


def test_kinds_differ_in_sizes_dtypes_and_arguments():
    one = kind(node_of(aten.add.Tensor, (2, 3), (3,)))
    assert one == kind(node_of(aten.add.Tensor, (2, 3), (3,)))
    others = [
        node_of(aten.add.Tensor, (2, 3), (1,)),
        node_of(aten.add.Tensor, (2, 3), (3,), dtype=torch.float64),
        node_of(aten.add.Scalar, (2, 3), extra=(1,)),
        node_of(aten.add.Scalar, (2, 3), extra=(2,)),
        node_of(aten.sub.Tensor, (2, 3), (3,)),
    ]
    assert len({one, *map(kind, others)}) == 6


def test_what_a_runtime_has_against_a_model_is_the_reason():
    node = node_of(aten.add.Tensor, (2, 3), (3,))
    assert Refusals(fault=lambda model: "no such kernel").of(node) == "no such kernel"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.quint8])
def test_types_that_onnx_does_not_have(dtype):
    assert "ONNX tensors cannot have the dtype" in str(no_type_of_onnx(dtype))
    assert no_type_of_onnx(torch.float32) is None


def test_a_node_that_writes_is_asked_though_it_gives_nothing():
    """``fill_kv_cache`` gives nothing; its functional twin is what is written as ONNX."""
    import dlinfer.ops  # noqa: F401 - registers the op

    with FakeTensorMode():
        fakes = [torch.empty(5, 2, 8), torch.empty(5, 2, 8), torch.empty(4, 8, 2, 8), torch.empty(4, 8, 2, 8)]
        fakes.append(torch.empty(5, dtype=torch.int64))
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(len(fakes))]
    for node, fake in zip(inputs, fakes, strict=True):
        node.meta["val"] = fake
    op = torch.ops.dlinfer.fill_kv_cache.default
    node = graph.call_function(op, tuple(inputs[: len(op._schema.arguments)]))
    node.meta["val"] = None
    assert Refusals(fault=lambda model: None).of(node) is None
    assert Refusals(fault=lambda model: "no scatter").of(node) == "no scatter"
