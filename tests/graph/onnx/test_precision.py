"""Numbers of 64 bits stay so: calls whose translation would shorten them are refused."""

import pytest
import torch

pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")

from dlinfer.graph.onnx.precision import _is_short
from tests.graph.onnx.test_exporter_faults import refusal_of

aten = torch.ops.aten
WIDE = torch.linspace(-3, 3, 12, dtype=torch.float64).view(3, 4)

SHORTENED = {
    "scalar_tensor": (aten.scalar_tensor.default, (0.1,), {"dtype": torch.float64}),
    "full": (aten.full.default, ([2], 0.1), {"dtype": torch.float64}),
    "fill": (aten.fill.Scalar, (WIDE, 0.1), {}),
    "hardtanh": (aten.hardtanh.default, (WIDE, -0.1, 0.1), {}),
    "threshold": (aten.threshold.default, (WIDE, 0.1, 0.3), {}),
    "arange": (aten.arange.start_step, (0, 1, 0.1), {"dtype": torch.float64}),
    "index_fill": (aten.index_fill.int_Scalar, (WIDE, 0, torch.tensor([1]), 0.1), {}),
    "nan_to_num": (aten.nan_to_num.default, (WIDE, 0.1), {}),
    "norm": (aten.linalg_vector_norm.default, (WIDE, 2.5), {}),
    "leaky_relu": (aten.leaky_relu.default, (WIDE, 0.01), {}),
    "beyond float32": (aten.fill.Scalar, (WIDE, 1e300), {}),
    "rounded to a short number": (aten.fill.Scalar, (WIDE, 1 + 1e-12), {}),
    "a function's attribute": (aten.addcmul.default, (WIDE, WIDE, WIDE), {"value": 0.1}),
    "log2": (aten.log2.default, (WIDE,), {}),
}


@pytest.mark.parametrize("name", SHORTENED)
def test_a_number_of_float32_beside_float64(name):
    op, args, kwargs = SHORTENED[name]
    assert "not precise enough for float64" in str(refusal_of(op, *args, **kwargs))


LONG_ENOUGH = {
    "add": (aten.add.Tensor, (WIDE, 0.1), {}),
    "mul": (aten.mul.Tensor, (WIDE, 0.1), {}),
    "comparison": (aten.gt.Scalar, (WIDE, 0.1), {}),
    "to float32": (aten._to_copy.default, (WIDE,), {"dtype": torch.float32}),
    "to float64": (aten._to_copy.default, (WIDE.float(),), {"dtype": torch.float64}),
    "all of it float32": (aten.fill.Scalar, (WIDE.float(), 0.1), {}),
    "softmax": (aten.softmax.int, (WIDE, -1), {}),
}


@pytest.mark.parametrize("name", LONG_ENOUGH)
def test_numbers_that_are_long_enough(name):
    op, args, kwargs = LONG_ENOUGH[name]
    assert refusal_of(op, *args, **kwargs) is None


def test_short_numbers():
    short = (0.0, -0.0, 1.0, 0.5, -1000.0, 2.0**-20, float("inf"), float("nan"))
    assert all(map(_is_short, short))
    assert not any(map(_is_short, (0.1, 1 + 1e-12, 1e300, 1 / 3, 2.0**13 + 1)))
