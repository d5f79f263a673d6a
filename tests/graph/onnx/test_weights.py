"""Models with tensors in them for some of their inputs."""

import pytest
import torch

pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")

from dlinfer.graph.functional.functionalize import function_of
from dlinfer.graph.onnx.export import export
from dlinfer.graph.onnx.weights import OnnxModel
from tests.vendor.regions import region_of


def graph_of(dtype: torch.dtype):
    def function(x, weight, y, bias):
        return (x @ weight + bias).relu() * y

    values = [torch.randn(3, 3).to(dtype) for _ in range(4)]
    return export(function_of(region_of(function, values, lambda *_: False)).graph_module), values


def read(model: bytes):
    import onnx

    loaded = onnx.ModelProto.FromString(model)
    names = [one.name for one in loaded.graph.input]
    return names, {one.name: onnx.numpy_helper.to_array(one) for one in loaded.graph.initializer}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_some_inputs_become_initialisers_and_inputs_again(dtype):
    graph, values = graph_of(dtype)
    before = graph.to_bytes()
    held = {graph.inputs[1]: values[1].t(), graph.inputs[3]: values[3]}
    names, weights = read(OnnxModel(graph, held).to_bytes())
    assert names == [graph.inputs[0], graph.inputs[2]]
    for name, value in held.items():
        assert torch.equal(torch.from_numpy(weights[name].astype("float32")), value.float())
    assert graph.to_bytes() == before


def test_large_weights_lie_beside_the_file(tmp_path):
    import onnx

    graph, values = graph_of(torch.float32)
    model = OnnxModel(graph, {graph.inputs[1]: values[1]})
    assert model.nbytes == 36
    path = model.save(tmp_path, inline=36)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    model.save(tmp_path, inline=0)
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name, "weights.bin"]
    loaded = onnx.load(path)
    (kept,) = [one for one in loaded.graph.initializer if one.name == graph.inputs[1]]
    assert torch.equal(torch.tensor(onnx.numpy_helper.to_array(kept)), values[1])
