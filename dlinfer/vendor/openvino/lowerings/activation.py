"""Activations and softmax."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.arithmetic import keeping_nan
from dlinfer.vendor.openvino.lowerings.elementary import exp, expm1, log1p_exp, opposite
from dlinfer.vendor.openvino.lowerings.shapes import channels, rank
from dlinfer.vendor.openvino.lowerings.slicing import halves
from dlinfer.vendor.openvino.registry import Build, lowers

aten = torch.ops.aten
F32 = ov.Type.f32


@lowers(aten.relu.default)
def relu(b: Builder, x: Output) -> Output:
    """Return x, or 0 where x is negative. OpenVINO's own Relu returns 0 for NaN."""
    zero = b.scalar(0, b.kind)
    if b.kind.is_real():
        return op.select(op.less(x, zero), zero, x).output(0)
    return op.maximum(x, zero).output(0)


@lowers(aten.silu.default)
def swish(b: Builder, x: Output) -> Output:
    """Return x * sigmoid(x). The factor 1 is explicit: without it OpenVINO refuses bfloat16."""
    return op.swish(x, b.scalar(1.0, x.get_element_type())).output(0)


@lowers(aten.gelu.default)
def gelu(b: Builder, x: Output, approximate: str = "none") -> Output:
    result = op.gelu(x, "tanh" if approximate == "tanh" else "erf").output(0)
    if b.kind != ov.Type.f16:
        return result
    # The plugin returns NaN for infinity.
    infinity = b.scalar(float("inf"), b.kind)
    return op.select(op.equal(x, infinity), infinity, result).output(0)


@lowers(aten.hardtanh.default)
def hardtanh(b: Builder, x: Output, low: Any = -1, high: Any = 1) -> Output:
    result = op.minimum(op.maximum(x, b.scalar(low, b.kind)), b.scalar(high, b.kind)).output(0)
    return keeping_nan(result, x)


lowers(aten.relu6.default)(lambda b, x: hardtanh(b, x, 0.0, 6.0))
lowers(aten.hardswish.default)(lambda b, x: op.hswish(x).output(0))


@lowers(aten.leaky_relu.default)
def leaky_relu(b: Builder, x: Output, slope: Any = 0.01) -> Output:
    return op.prelu(x, op.reshape(b.cast(slope, b.kind), b.axes([1]), False)).output(0)


@lowers(aten.prelu.default)
def prelu(b: Builder, x: Output, weight: Output) -> Output:
    """Multiply negative elements by a slope: one for each channel (dimension 1), or one for all."""
    if rank(x) > 2 and rank(weight) == 1:
        weight = channels(b, weight, rank(x))
    negative = op.less(x, b.scalar(0, b.kind))
    return op.select(negative, op.multiply(x, weight), x).output(0)


@lowers(aten.elu.default)
def elu(b: Builder, x: Output, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Output:
    wide = b.cast(x, F32)
    below = expm1(b, op.multiply(wide, b.scalar(input_scale, F32)))
    low = op.multiply(below, b.scalar(alpha * scale, F32))
    positive = op.greater(wide, b.scalar(0.0, F32))
    return b.cast(op.select(positive, op.multiply(wide, b.scalar(scale, F32)), low).output(0), b.kind)


@lowers(aten.hardsigmoid.default)
def hardsigmoid(b: Builder, x: Output) -> Output:
    wide = b.cast(x, F32)
    result = op.hard_sigmoid(wide, b.scalar(1 / 6, F32), b.scalar(0.5, F32))
    return b.cast(keeping_nan(result.output(0), wide), b.kind)


@lowers(aten.mish.default)
def mish(b: Builder, x: Output) -> Output:
    """Return x * tanh(log(1 + e)) with e = exp(x), computed as x * n / (n + 2) with n = e * (e + 2).

    OpenVINO's own Mish is less exact."""
    wide = b.cast(x, F32)
    power = exp(op.minimum(wide, b.scalar(20.0, F32)))  # above that the factor is 1 in float32
    twice = op.multiply(power, op.add(power, b.scalar(2.0, F32)))
    factor = op.divide(twice, op.add(twice, b.scalar(2.0, F32)))
    return b.cast(op.multiply(wide, factor).output(0), b.kind)


@lowers(aten.softplus.default)
def softplus(b: Builder, x: Output, beta: Any = 1, threshold: Any = 20) -> Output:
    wide = op.multiply(b.cast(x, F32), b.scalar(beta, F32))
    high = op.maximum(wide, b.scalar(0.0, F32))
    rest = log1p_exp(b, opposite(b, op.abs(wide)))
    soft = op.multiply(op.add(high, rest), b.scalar(1 / beta if beta else float("inf"), F32))
    plain = op.greater(wide, b.scalar(threshold, F32))
    return b.cast(op.select(plain, b.cast(x, F32), soft).output(0), b.kind)


@lowers(aten.log_sigmoid.default)
def log_sigmoid(b: Builder, x: Output) -> Output:
    wide = b.cast(x, F32)
    low = op.minimum(wide, b.scalar(0.0, F32))
    rest = log1p_exp(b, opposite(b, op.abs(wide)))
    return b.cast(op.subtract(low, rest).output(0), b.kind)


@lowers(aten.glu.default)
def glu(b: Builder, x: Output, dim: int = -1) -> Output:
    first, second = halves(b, x, dim)
    return op.multiply(first, op.sigmoid(second)).output(0)


def _softmax(function: Any, of_scalar: Any) -> Build:
    """Return a lowering to ``function``, a softmax. As in torch, the input is first converted to the result's dtype.

    of_scalar: for x of rank 0. It is called as of_scalar(x, x): x / x is the softmax, and x - x the log-softmax."""

    def build(b: Builder, x: Output, dim: int, *_: Any) -> Output:
        x = b.cast(x, b.kind)
        if rank(x) == 0:
            return of_scalar(x, x).output(0)
        return where_defined(b, x, dim % rank(x), function(x, dim % rank(x)).output(0))

    return build


lowers(aten.softmax.int, aten._softmax.default)(_softmax(op.softmax, op.divide))
lowers(aten.log_softmax.int, aten._log_softmax.default)(_softmax(op.log_softmax, op.subtract))


def where_defined(b: Builder, x: Output, axis: int, result: Output) -> Output:
    """Return ``result``, a softmax of x along ``axis``, with NaN in the rows whose softmax is NaN in torch.

    These are rows with NaN or positive infinity, and rows of negative infinities only; OpenVINO returns numbers for
    them. Each element gets a code: 0 for negative infinity, 1 for a finite number, 2 for positive infinity and NaN. A
    row keeps its result if its largest code is 1."""
    wide = b.cast(x, F32)  # float32 holds infinity of any type of x
    zero, unit, two, infinity = (b.scalar(value, F32) for value in (0.0, 1.0, 2.0, float("inf")))
    finite_or_none = op.select(op.less(op.negative(infinity), wide), unit, zero)
    kind = op.reduce_max(op.select(op.less(wide, infinity), finite_or_none, two), b.axes([axis]), True)
    nan = b.scalar(float("nan"), result.get_element_type())
    return op.select(op.equal(kind, unit), result, nan).output(0)
