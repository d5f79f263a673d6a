"""Elementary functions of one operand, and ``logaddexp``."""

import math
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output
from openvino.op import Constant

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.registry import Build, defaults, lowers

aten = torch.ops.aten


def _plain(function: Any) -> Build:
    """Return a lowering to one op in the result's type. Integers are converted to floats first, as in torch."""

    return lambda b, x: function(b.cast(x, b.kind)).output(0)


for _name in "log sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid".split():
    lowers(*defaults(_name))(_plain(getattr(op, _name)))


def _of_wide(function: Any) -> Build:
    """Return a lowering to a formula, computed in float32: 16 bits are too coarse for its intermediate values."""

    def build(b: Builder, x: Output) -> Output:
        result = function(b, b.cast(x, ov.Type.f32))
        return b.cast(result if isinstance(result, Output) else result.output(0), b.kind)

    return build


def _number(b: Builder, value: float) -> Output:
    return b.scalar(value, ov.Type.f32)


def exp(x: Any) -> Any:
    """Return e to the power of x, and NaN for NaN. OpenVINO's own Exp returns infinity for NaN."""
    return op.select(op.is_nan(x), x, op.exp(x))


_LN2, _LN10 = 0.6931471805599453, 2.302585092994046


def opposite(b: Builder, x: Any) -> Any:
    """Return -x for float32 x, as a product with -1.

    The plugin puts nodes of its own in place of negations, differences with a constant, and quotients. Its nodes lack
    the attribute that makes a node compute in float32 in a bfloat16 model (workarounds/precision.py)."""
    return op.multiply(x, _number(b, -1.0))


def quotient(b: Builder, x: Any, y: Any) -> Any:
    return op.multiply(x, op.power(y, _number(b, -1.0)))


def log1p(b: Builder, x: Any) -> Any:
    """Return log(1 + x) for float32 x, computed as log(u) * x / (u - 1) with u = 1 + x (Kahan), or as x if u is 1."""
    unit = _number(b, 1.0)
    near = op.add(x, unit)
    off = op.add(near, _number(b, -1.0))
    exact = op.equal(off, _number(b, 0.0))
    infinite = op.equal(near, _number(b, float("inf")))
    corrected = op.multiply(op.log(near), quotient(b, x, op.select(exact, unit, off)))
    return op.select(infinite, near, op.select(exact, x, corrected))


def expm1(b: Builder, x: Any) -> Any:
    """Return exp(x) - 1 for float32 x, computed as (u - 1) * x / log(u) with u = exp(x) (Kahan).

    The result is x if u is 1, and -1 if u is 0.
    """
    zero = _number(b, 0.0)
    near = exp(x)
    off = op.add(near, _number(b, -1.0))
    exact, gone = op.equal(off, zero), op.equal(near, zero)
    infinite = op.equal(near, _number(b, float("inf")))
    safe = op.select(op.logical_or(op.logical_or(exact, gone), infinite), _number(b, 2.0), near)
    corrected = op.multiply(off, quotient(b, x, op.log(safe)))
    return op.select(op.logical_or(gone, infinite), off, op.select(exact, x, corrected))


def log1p_exp(b: Builder, x: Any) -> Any:
    """Return log(1 + exp(x)) for float32 x of at most 0."""
    return log1p(b, exp(x))


def _erf(b: Builder, x: Output) -> Any:
    """Return erf(x), near 0 by the first terms of the Maclaurin series.

    Elsewhere OpenVINO's Erf is used, whose absolute error is 1e-7.
    """
    square = op.multiply(x, x)
    series = _number(b, 1 / 216)
    for divisor in (-42, 10, -3, 1):
        series = op.add(op.multiply(series, square), _number(b, 1 / divisor))
    near = op.multiply(op.multiply(x, _number(b, 2 / math.sqrt(math.pi))), series)
    return op.select(op.less(op.abs(x), _number(b, 0.25)), near, op.erf(x))


_ERFC = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587)
_ERFC += (-0.82215223, 0.17087277)


def _erfc(b: Builder, x: Output) -> Any:
    """Return 1 - erf(x), computed without the subtraction, which would give 0 above 4.

    This is the Chebyshev fit of Numerical Recipes (2nd edition, section 6.2), with relative error 1.2e-7: t * exp(-x^2
    + P(t)) with t = 1 / (1 + |x| / 2).
    """
    size = op.abs(x)
    t = op.divide(_number(b, 1.0), op.add(_number(b, 1.0), op.multiply(size, _number(b, 0.5))))
    fit = _number(b, _ERFC[-1])
    for factor in reversed(_ERFC[:-1]):
        fit = op.add(op.multiply(fit, t), _number(b, factor))
    tail = op.multiply(t, exp(op.subtract(fit, op.multiply(size, size))))
    return op.select(op.less(x, _number(b, 0.0)), op.subtract(_number(b, 2.0), tail), tail)


for _target, _formula in {
    aten.rsqrt: lambda b, x: op.divide(_number(b, 1.0), op.sqrt(x)),
    aten.reciprocal: lambda b, x: op.divide(_number(b, 1.0), x),
    aten.exp: lambda b, x: exp(x),
    aten.exp2: lambda b, x: exp(op.multiply(x, _number(b, _LN2))),
    aten.log2: lambda b, x: op.divide(op.log(x), _number(b, _LN2)),
    aten.log10: lambda b, x: op.divide(op.log(x), _number(b, _LN10)),
    aten.log1p: log1p,
    aten.expm1: expm1,
    aten.erf: _erf,
    aten.erfc: _erfc,
}.items():
    lowers(_target.default)(_of_wide(_formula))


def _same_for_whole_numbers(function: Any) -> Build:
    return lambda b, x: function(x).output(0) if b.kind.is_real() else x


lowers(aten.floor.default)(_same_for_whole_numbers(op.floor))
lowers(aten.ceil.default)(_same_for_whole_numbers(op.ceiling))
lowers(aten.round.default)(_same_for_whole_numbers(lambda x: op.round(x, "half_to_even")))


def _signed(function: Any) -> Build:
    def build(b: Builder, x: Output) -> Output:
        if b.kind == ov.Type.boolean:
            return x
        kind = integers.computed_in(b.kind)
        return b.cast(function(b.cast(x, kind)).output(0), b.kind)

    return build


lowers(aten.abs.default, aten.absolute.default)(_signed(op.abs))
lowers(aten.neg.default, aten.negative.default)(_signed(op.negative))


def _sign(x: Output) -> Any:
    """Return the sign of x; 0 for NaN, as torch does."""
    if not x.get_element_type().is_real():
        return op.sign(x)
    zero = Constant(x.get_element_type(), ov.Shape([]), [0.0])
    return op.select(op.is_nan(x), zero, op.sign(x))


lowers(aten.sign.default, aten.sgn.default)(_signed(_sign))


@lowers(aten.logaddexp.default)
def logaddexp(b: Builder, x: Output, y: Output) -> Output:
    kind = ov.Type.f32
    x, y = b.cast(x, kind), b.cast(y, kind)
    high = op.maximum(x, y)
    result = op.add(high, log1p_exp(b, opposite(b, op.abs(op.subtract(x, y)))))
    same = op.equal(x, y)  # if both are infinite, their difference is NaN
    twice = op.add(high, b.scalar(_LN2, kind))
    return b.cast(op.select(same, twice, result).output(0), b.kind)
