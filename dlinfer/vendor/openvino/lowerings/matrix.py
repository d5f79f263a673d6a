"""Matrix products."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import Call, defaults, lowers

aten, dlinfer = torch.ops.aten, torch.ops.dlinfer


def floats(call: Call) -> str | None:
    """Return a reason to refuse a product of integers, which OpenVINO would round to float32; None for floats."""
    result = call.result[0] if isinstance(call.result, (list, tuple)) else call.result
    return None if result.is_floating_point() else "it multiplies matrices of integers"


def product(x: Output, y: Output, transpose_x: bool = False, transpose_y: bool = False) -> Output:
    """Return x @ y over the last two dimensions, each transposed on request.

    x or y may be a vector. A vector x is one row, a vector y one column. The nodes that make vectors matrices are
    explicit: nodes that OpenVINO inserts itself would compute float32 in 16 bits (``workarounds/precision.py``)."""
    vectors = [axis for axis, value in ((-2, x), (-1, y)) if rank(value) == 1]
    if rank(x) == 1:
        x, transpose_x = op.unsqueeze(x, _axes([0])).output(0), False
    if rank(y) == 1:
        y, transpose_y = op.unsqueeze(y, _axes([1])).output(0), False
    matrix = op.matmul(x, y, transpose_x, transpose_y).output(0)
    return op.squeeze(matrix, _axes(vectors)).output(0) if vectors else matrix


def _axes(axes: list[int]) -> Output:
    return op.constant(axes, ov.Type.i64).output(0)


@lowers(aten.linear.default, dlinfer.linear.default, refuses=floats)
def linear(b: Builder, x: Output, weight: Output, bias: Output | None = None) -> Output:
    result = product(x, weight, transpose_y=True)
    return result if bias is None else op.add(result, bias).output(0)


@lowers(dlinfer.linears.default, refuses=floats)
def linears(b: Builder, x: Output, weights: list[Output], biases: list[Output | None]) -> list[Output]:
    return [linear(b, x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


lowers(*defaults("mm bmm matmul mv dot vdot"), refuses=floats)(lambda b, x, y: product(x, y))


@lowers(aten.inner.default, refuses=floats)
def inner(b: Builder, x: Output, y: Output) -> Output:
    if not rank(x) or not rank(y):
        return op.multiply(x, y).output(0)
    if rank(y) > 2:
        raise ValueError("it is an inner product of 3-d tensors")
    return linear(b, x, y)


@lowers(aten.outer.default, aten.ger.default)
def outer(b: Builder, x: Output, y: Output) -> Output:
    column = op.unsqueeze(b.cast(x, b.kind), b.axes([1]))
    return op.multiply(column, op.unsqueeze(b.cast(y, b.kind), b.axes([0]))).output(0)


def _counts(call: Call) -> str | None:
    """Return a reason to refuse a product of integers, or alpha=0 in an op other than ``baddbmm``; else None.

    With alpha=0 those ops of torch ignore NaN in the matrices.
    """
    if call.arguments["alpha"] == 0 and call.target is not aten.baddbmm.default:
        return "the factor of a product is 0, so its matrices must not be read"
    return floats(call)


def _times(b: Builder, x: Output, by: Any) -> Output:
    if not isinstance(by, Output) and by == 1:
        return x
    return op.multiply(x, b.cast(by, x.get_element_type())).output(0)


@lowers(aten.addmm.default, aten.addmv.default, aten.baddbmm.default, refuses=_counts)
def addmm(b: Builder, x: Output, y: Output, z: Output, beta: Any = 1, alpha: Any = 1) -> Output:
    result = _times(b, product(y, z), alpha)
    if not isinstance(beta, Output) and beta == 0:  # x is not read
        return result
    return op.add(result, _times(b, x, beta)).output(0)


def _plain_equation(call: Call) -> str | None:
    return (
        "the equation of einsum has an ellipsis" if "." in str(call.arguments["equation"]) else floats(call)
    )


@lowers(aten.einsum.default, refuses=_plain_equation)
def einsum(b: Builder, equation: str, tensors: list[Output], path: Any = None) -> Output:
    text = equation.replace(" ", "")
    if "->" not in text:
        letters = "".join(sorted({c for c in text if c.isalpha() and text.count(c) == 1}))
        text = f"{text}->{letters}"
    return b.cast(op.einsum([b.cast(tensor, ov.Type.f32) for tensor in tensors], text).output(0), b.kind)
