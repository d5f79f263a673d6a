"""Changes of sizes."""

from collections.abc import Sequence
from typing import Any

import torch

from dlinfer.graph.onnx.translations.writing import opset


def table() -> dict[Any, Any]:
    """Translations by op."""
    return {torch.ops.aten.reshape.default: reshape}


def reshape(x: Any, shape: Sequence[Any]) -> Any:
    """x with new sizes: numbers, or values of the graph. A size of 0 is 0, where torch.onnx's copies one of x."""
    op = opset()
    if all(isinstance(size, int) for size in shape):
        return op.Reshape(x, op.Constant(value_ints=list(shape)), allowzero=int(0 in shape))
    one = op.Constant(value_ints=[1])
    pieces = [
        op.Constant(value_ints=[size]) if isinstance(size, int) else op.Reshape(size, one) for size in shape
    ]
    return op.Reshape(x, op.Concat(*pieces, axis=0), allowzero=1)
