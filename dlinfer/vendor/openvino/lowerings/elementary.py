"""Elementary functions of one operand."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output
from openvino.op import Constant

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.registry import lowers

aten = torch.ops.aten


def _plain(function: Any) -> Any:
    """An op of OpenVINO's that does just that, of the result's type: torch turns whole numbers into floats first."""

    def build(b: Builder, x: Output) -> Output:
        return function(b.cast(x, b.kind)).output(0)

    return build


for _target, _function in {
    aten.log: op.log,
    aten.sqrt: op.sqrt,
    aten.sin: op.sin,
    aten.cos: op.cos,
    aten.tan: op.tan,
    aten.asin: op.asin,
    aten.acos: op.acos,
    aten.atan: op.atan,
    aten.sinh: op.sinh,
    aten.cosh: op.cosh,
    aten.tanh: op.tanh,
    aten.asinh: op.asinh,
    aten.acosh: op.acosh,
    aten.atanh: op.atanh,
    aten.erf: op.erf,
    aten.sigmoid: op.sigmoid,
}.items():
    lowers(_target.default)(_plain(_function))


def _of_wide(function: Any) -> Any:
    """A formula that 16-bit floats are too coarse for in between: in float32."""

    def build(b: Builder, x: Output) -> Output:
        made = function(b, b.cast(x, ov.Type.f32))
        return b.cast(made if isinstance(made, Output) else made.output(0), b.kind)

    return build


def _number(b: Builder, value: float) -> Output:
    return b.scalar(value, ov.Type.f32)


def _exp(x: Any) -> Any:
    """OpenVINO's gives a number for what is none."""
    return op.select(op.is_nan(x), x, op.exp(x))


_LN2, _LN10 = 0.6931471805599453, 2.302585092994046


def _log1p(b: Builder, x: Output) -> Any:
    """log(u) * x / (u - 1) with u = 1 + x, which corrects u's rounding (Kahan); x itself where u is 1."""
    one = _number(b, 1.0)
    near = op.add(x, one)
    off = op.subtract(near, one)
    exact = op.equal(off, _number(b, 0.0))
    infinite = op.equal(near, _number(b, float("inf")))
    corrected = op.multiply(op.log(near), op.divide(x, op.select(exact, one, off)))
    return op.select(infinite, near, op.select(exact, x, corrected))


def _expm1(b: Builder, x: Output) -> Any:
    """(u - 1) * x / log(u) with u = exp(x) (Kahan); x itself where u is 1, -1 where u is 0."""
    one, zero = _number(b, 1.0), _number(b, 0.0)
    near = _exp(x)
    off = op.subtract(near, one)
    exact, gone = op.equal(off, zero), op.equal(near, zero)
    infinite = op.equal(near, _number(b, float("inf")))
    safe = op.select(op.logical_or(op.logical_or(exact, gone), infinite), _number(b, 2.0), near)
    corrected = op.multiply(off, op.divide(x, op.log(safe)))
    return op.select(op.logical_or(gone, infinite), off, op.select(exact, x, corrected))


for _target, _formula in {
    aten.rsqrt: lambda b, x: op.divide(_number(b, 1.0), op.sqrt(x)),
    aten.reciprocal: lambda b, x: op.divide(_number(b, 1.0), x),
    aten.exp: lambda b, x: _exp(x),
    aten.exp2: lambda b, x: _exp(op.multiply(x, _number(b, _LN2))),
    aten.log2: lambda b, x: op.divide(op.log(x), _number(b, _LN2)),
    aten.log10: lambda b, x: op.divide(op.log(x), _number(b, _LN10)),
    aten.log1p: _log1p,
    aten.expm1: _expm1,
    aten.erfc: lambda b, x: op.subtract(_number(b, 1.0), op.erf(x)),
}.items():
    lowers(_target.default)(_of_wide(_formula))


def _same_for_whole_numbers(function: Any) -> Any:
    def build(b: Builder, x: Output) -> Output:
        return function(x).output(0) if b.kind.is_real() else x

    return build


floor = lowers(aten.floor.default)(_same_for_whole_numbers(op.floor))
ceil = lowers(aten.ceil.default)(_same_for_whole_numbers(op.ceiling))
round_ = lowers(aten.round.default)(_same_for_whole_numbers(lambda x: op.round(x, "half_to_even")))


def _signed(function: Any) -> Any:
    def build(b: Builder, x: Output) -> Output:
        if b.kind == ov.Type.boolean:
            return x
        kind = integers.computed_in(b.kind)
        return b.cast(function(b.cast(x, kind)).output(0), b.kind)

    return build


absolute = lowers(aten.abs.default, aten.absolute.default)(_signed(op.abs))
neg = lowers(aten.neg.default, aten.negative.default)(_signed(op.negative))


def _sign(x: Output) -> Any:
    """torch gives 0 for what is no number."""
    if not x.get_element_type().is_real():
        return op.sign(x)
    zero = Constant(x.get_element_type(), ov.Shape([]), [0.0])
    return op.select(op.is_nan(x), zero, op.sign(x))


sign = lowers(aten.sign.default, aten.sgn.default)(_signed(_sign))


@lowers(aten.positive.default)
def positive(b: Builder, x: Output) -> Output:
    return x


@lowers(aten.logaddexp.default)
def logaddexp(b: Builder, x: Output, y: Output) -> Output:
    kind = ov.Type.f32
    x, y = b.cast(x, kind), b.cast(y, kind)
    high = op.maximum(x, y)
    rest = op.exp(op.negative(op.abs(op.subtract(x, y))))
    made = op.add(high, op.log(op.add(b.scalar(1.0, kind), rest)))
    same = op.equal(x, y)  # both infinite: their difference is no number
    twice = op.add(high, b.scalar(_LN2, kind))
    return b.cast(op.select(same, twice, made).output(0), b.kind)
