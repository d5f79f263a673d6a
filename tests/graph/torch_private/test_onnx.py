"""The private parts of torch's ONNX exporter behind the seam: what a torch release moves fails here, by name."""

import logging

import pytest
import torch
from torch import fx

pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")

from dlinfer.graph.torch_private import fake_mode, onnx
from dlinfer.graph.torch_private.onnx import Registry, UntranslatableError, onnx_type

aten = torch.ops.aten


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(18, {aten.linalg_svdvals.default: refusing})


def refusing(A, *, driver=None):  # noqa: N803 - named as in torch's schema
    raise ValueError("not this one\nand more")


def graph_of(op, *shapes: tuple[int, ...]) -> fx.Graph:
    mode = fake_mode.fresh_mode()
    fakes = [mode.from_tensor(torch.zeros(shape)) for shape in shapes]
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(len(shapes))]
    for node, value in zip(inputs, fakes, strict=True):
        node.meta = {"val": value, "nn_module_stack": {}}
    call = graph.call_function(op, tuple(inputs))
    call.meta = {"val": op(*fakes), "nn_module_stack": {}}
    graph.output((call,))
    return graph


def test_a_graph_becomes_a_model_with_named_sizes(registry):
    model = registry.translate(graph_of(aten.mul.Tensor, (3, 5), (3, 5)), "it")
    assert [node.op_type for node in model.graph] == ["Mul"]
    assert [str(value.shape) for value in model.graph.inputs] == ["[s77,s27]"] * 2 or all(
        not isinstance(size, int) for value in model.graph.inputs for size in value.shape
    )
    assert model.opset_imports[""] == 18


def test_ours_go_before_torchs_own(registry):
    assert registry.knows(aten.linalg_svdvals.default)
    assert registry.knows(aten.add.Tensor)
    assert not registry.knows(aten.linalg_eig.default)
    assert not Registry(18, {}).knows(aten.linalg_svdvals.default)


def test_what_a_translation_raises_names_the_node(registry):
    with pytest.raises(UntranslatableError) as caught:
        registry.translate(graph_of(aten.linalg_svdvals.default, (3, 3)), "it")
    assert caught.value.node == "linalg_svdvals_default"
    assert caught.value.reason == "torch.onnx: ValueError: not this one"


def test_ops_without_a_translation_have_torchs_decompositions(registry):
    assert aten.hardswish.default in registry.decompositions or registry.knows(aten.hardswish.default)
    assert aten.add.Tensor not in registry.decompositions


def test_a_table_is_made_without_a_word(caplog, capsys):
    """Also where the logger has spoken before, and it may speak again afterwards."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    logger.warning("before")
    caplog.clear()
    onnx._torch_table.cache_clear()
    capsys.readouterr()
    Registry(19, {})
    assert (caplog.text, capsys.readouterr().err) == ("", "")
    logger.warning("afterwards")
    assert caplog.messages == ["afterwards"]


def test_types_have_onnxs_numbers():
    from onnx_ir import DataType

    assert onnx_type(torch.float32) == DataType.FLOAT
    assert onnx_type(torch.bool) == DataType.BOOL
    assert onnx_type(torch.quint8) is None
