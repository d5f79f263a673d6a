"""Translate linear layers. Their weights are [out_features, in_features], as in torch.nn.Linear."""

from collections.abc import Sequence

import torch

from dlinfer.graph.onnx.translations.writing import Value, number, op, rank, shape_of, size, sizes, translates


@translates(torch.ops.aten.linear.default, torch.ops.dlinfer.linear.default)
def linear(input: Value = None, weight: Value = None, bias: Value = None, x: Value = None) -> Value:
    """Return ``input @ weight.T + bias``. dlinfer's op passes its input as ``x``."""
    values = x if input is None else input
    if any(size(values, dim) == 0 for dim in range(rank(values))):
        return nothing(values, weight, bias)
    if rank(values) == 2:
        addend = () if bias is None else (bias,)
        return op.Gemm(values, weight, *addend, transB=1)
    product = op.MatMul(values, op.Transpose(weight, perm=[1, 0]))
    return product if bias is None else op.Add(product, bias)


def nothing(x: Value, weight: Value, bias: Value) -> Value:
    """Return the result for an input without elements. ONNX Runtime rewrites matrix products wrongly if a size is 0."""
    start = number(0.0, x) if bias is None else bias
    return op.Expand(start, shape_of([*sizes(x, 0, -1), (weight, 0)]))


@translates(torch.ops.dlinfer.linears.default)
def linears(x: Value, weights: Sequence[Value], biases: Sequence[Value]) -> list[Value]:
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
