"""Sums and products of bools and integers are int64 in torch; ONNX's ops give the type that they take."""

import numpy as np
import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from dlinfer.graph.onnx.export import export

onnxruntime = pytest.importorskip(
    "onnxruntime", reason="needs onnxruntime: pip install 'dlinfer[onnxruntime]'"
)
pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten.cumsum.default, (1,)),
        (aten.sum.default, ()),
        (aten.sum.dim_IntList, ([1],)),
        (aten.prod.default, ()),
    ],
    ids=str,
)
def test_it_accumulates_as_torch_does(op, arguments, dtype):
    x = torch.tensor([[3, 0, 2], [1, 1, 4]]).to(dtype)
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = FakeTensorMode().from_tensor(x)
    call = graph.call_function(op, (node, *arguments))
    with node.meta["val"].fake_mode:
        call.meta["val"] = op(node.meta["val"], *arguments)
    graph.output((call,))
    model = export(fx.GraphModule(torch.nn.Module(), graph))
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    (value,) = session.run(None, {model.inputs[0]: x.numpy()})
    expected = op(x, *arguments).numpy()
    assert value.dtype == expected.dtype
    np.testing.assert_array_equal(value, expected)
