"""Translations of matrix products, linear layers, convolutions and embeddings."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value
from dlinfer.vendor.megengine.translations.table import aten, broadcast, float32, ours, reshaped, translation


@translation(aten.linear.default)
def _linear(
    writer: NodeList, result: Tensor, input: Value, weight: Value, bias: Value | None = None
) -> Value:
    if len(weight.shape) != 2:
        raise UntranslatableError("the weight is not a matrix")
    rows = math.prod(input.shape[:-1])
    flat = reshaped(writer, input, (rows, input.shape[-1]))
    output = writer.op("matmul", flat, weight, like=(rows, weight.shape[0]), transpose_b=True)
    if bias is not None:
        output = writer.op("add", output, bias, like=output)
    return reshaped(writer, output, result.shape)


@translation(ours.linear.default)
def _own_linear(writer: NodeList, result: Tensor, x: Value, weight: Value, bias: Value | None) -> Value:
    return _linear(writer, result, x, weight, bias)


@translation(ours.linears.default)
def _linears(
    writer: NodeList,
    result: Sequence[Tensor],
    x: Value,
    weights: Sequence[Value],
    biases: Sequence[Value | None],
) -> list[Value]:
    layers = zip(result, weights, biases, strict=True)
    return [_linear(writer, output, x, weight, bias) for output, weight, bias in layers]


@translation(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _matmul(writer: NodeList, result: Tensor, **arguments: Value) -> Value:
    left, right = arguments["self"], arguments.get("other", arguments.get("mat2"))
    assert right is not None
    if len(left.shape) < 2 or len(right.shape) < 2:
        raise UntranslatableError("an operand of the product is a vector")
    return product(writer, left, right, tuple(result.shape))


def product(
    writer: NodeList, left: Value, right: Value, shape: tuple[int, ...], transpose: bool = False
) -> Value:
    """Return the product of two batches of matrices.

    MegEngine takes at most three dimensions, so all batch dimensions become one.
    shape: the sizes of the result. transpose: whether to multiply by the transpose of ``right``."""
    if len(shape) == 2:
        return writer.op("matmul", left, right, like=shape, transpose_b=transpose)
    batch = shape[:-2]
    flat = []
    for operand in (left, right):
        full = broadcast(writer, operand, (*batch, *operand.shape[-2:]))
        flat.append(reshaped(writer, full, (math.prod(batch), *operand.shape[-2:])))
    output = writer.op("matmul", *flat, like=(math.prod(batch), *shape[-2:]), transpose_b=transpose)
    return reshaped(writer, output, shape)


@translation(aten.addmm.default)
def _addmm(
    writer: NodeList, result: Tensor, self: Value, mat1: Value, mat2: Value, beta: float = 1, alpha: float = 1
) -> Value:
    if (beta, alpha) != (1, 1):
        raise UntranslatableError("addmm has factors")
    return writer.op("add", writer.op("matmul", mat1, mat2, like=result), self, like=result)


@translation(aten.conv2d.default)
def _conv2d(
    writer: NodeList,
    result: Tensor,
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
) -> Value:
    if len(input.shape) != 4 or groups != 1:
        raise UntranslatableError("the convolution has groups, or its input is not 4-d")

    def pair(value: Sequence[int]) -> list[int]:
        return list(value) * (2 if len(value) == 1 else 1)

    window: dict[str, Any] = {"stride": pair(stride), "padding": pair(padding), "dilation": pair(dilation)}
    output = writer.op("convolution", input, weight, like=result, **window)
    if bias is None:
        return output
    return writer.op("add", output, reshaped(writer, bias, (1, bias.shape[0], 1, 1)), like=result)


@translation(aten.embedding.default, mixed=True)
def _embedding(writer: NodeList, result: Tensor, weight: Value, indices: Value, **_: Any) -> Value:
    float32(weight)
    if not any(indices.name == name for name, _, _ in writer.inputs):
        raise UntranslatableError("the embedding's indices are computed, so nothing checks their range")
    rows = writer.indices.get(indices.name, weight.shape[0])
    writer.indices[indices.name] = min(rows, weight.shape[0])
    return writer.op("rows", weight, indices, like=result)
