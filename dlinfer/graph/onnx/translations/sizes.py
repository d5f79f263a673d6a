"""Changes of sizes."""

from collections.abc import Sequence

import torch

from dlinfer.graph.onnx.translations.writing import Table, Value, opset, shape_of


def table() -> Table:
    """Translations by op."""
    return {torch.ops.aten.reshape.default: reshape}


def reshape(x: Value, shape: Sequence[Value]) -> Value:
    """x with new sizes: numbers, or values of the graph. A size of 0 is 0, where torch.onnx's copies one of x."""
    fixed = 0 not in shape and all(isinstance(size, int) for size in shape)
    return opset().Reshape(x, shape_of(shape), allowzero=int(not fixed))
