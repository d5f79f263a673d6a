"""Arithmetic of two or three operands, with torch's promotion of dtypes and its rounding of scalars."""

import math
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.dtypes import SHORT
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.registry import Build, Call, defaults, lowers

aten = torch.ops.aten


def computed_in(b: Builder, *operands: Any) -> ov.Type:
    """Return the type to compute in if the result has type ``b.kind``.

    If an operand is a Python number that is not exact in 16 bits, torch computes 16-bit floats in float32. 8-bit and
    16-bit integers are computed in i32."""
    kind = b.kind
    if kind in SHORT:
        for operand in operands:
            if (
                isinstance(operand, (int, float))
                and float(torch.tensor(operand, dtype=SHORT[kind])) != operand
            ):
                return ov.Type.f32
        return kind
    return integers.computed_in(kind)


def _is_bool(b: Builder) -> bool:
    return b.kind == ov.Type.boolean


def _plus(b: Builder, x: Any, y: Any, alpha: Any, function: Any) -> Output:
    if _is_bool(b):  # torch has no subtraction of bools
        return op.logical_or(b.cast(x, b.kind), b.cast(y, b.kind)).output(0)
    kind = computed_in(b, x, y, alpha)
    x, y = b.cast(x, kind), b.cast(y, kind)
    if isinstance(alpha, Output) or alpha != 1:
        y = op.multiply(y, b.cast(alpha, kind)).output(0)
    return b.cast(function(x, y).output(0), b.kind)


lowers(aten.add.Tensor, aten.add.Scalar)(lambda b, x, y, alpha=1: _plus(b, x, y, alpha, op.add))
lowers(aten.sub.Tensor, aten.sub.Scalar)(lambda b, x, y, alpha=1: _plus(b, x, y, alpha, op.subtract))
lowers(aten.rsub.Tensor, aten.rsub.Scalar)(lambda b, x, y, alpha=1: _plus(b, y, x, alpha, op.subtract))


def _pair(function: Any, of_bools: Any = None, keeps_nan: bool = False) -> Build:
    def build(b: Builder, x: Any, y: Any) -> Output:
        if _is_bool(b):
            return of_bools(b.cast(x, b.kind), b.cast(y, b.kind)).output(0)
        kind = computed_in(b, x, y)
        x, y = b.cast(x, kind), b.cast(y, kind)
        result = function(x, y).output(0)
        return b.cast(keeping_nan(result, x, y) if keeps_nan else result, b.kind)

    return build


div = _pair(op.divide)  # of floats, always
lowers(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar)(div)
lowers(aten.mul.Tensor, aten.mul.Scalar)(_pair(op.multiply, op.logical_and))
lowers(aten.maximum.default, aten.max.other)(_pair(op.maximum, op.logical_or, keeps_nan=True))
lowers(aten.minimum.default, aten.min.other)(_pair(op.minimum, op.logical_and, keeps_nan=True))


def _exact(call: Call) -> str | None:
    """Return a reason to refuse a remainder or rounded quotient of floats; None if the plugin computes it exactly."""
    by = call.fake("other")
    whole = not call.result.is_floating_point()
    if whole or (isinstance(by, (int, float)) and by and math.frexp(by)[0] in (0.5, -0.5)):
        return None
    return "the divisor of a float remainder is not a fixed power of two: OpenVINO rounds the quotient"


def _exact_mode(call: Call) -> str | None:
    return _exact(call) if call.arguments["rounding_mode"] is not None else None


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode, refuses=_exact_mode)
def div_mode(b: Builder, x: Any, y: Any, rounding_mode: str | None) -> Output:
    if rounding_mode is None:
        return div(b, x, y)
    if rounding_mode == "floor":
        return floor_divide(b, x, y)
    kind = computed_in(b, x, y)
    if b.kind.is_real():
        return b.cast(_truncate(b, op.divide(b.cast(x, kind), b.cast(y, kind)).output(0)), b.kind)
    return b.cast(integers.truncated(b, b.cast(x, kind), _divisor(b, y, kind))[0], b.kind)


def _divisor(b: Builder, y: Any, kind: ov.Type) -> Any:
    """Return a divisor of integers. If it is 0 in a call, torch runs that call, and raises."""
    if isinstance(y, Output) or not y:
        y = b.cast(y, kind)
        b.fault(op.equal(y, b.scalar(0, kind)).output(0), "an integer is divided by 0")
    return y


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar, refuses=_exact)
def floor_divide(b: Builder, x: Any, y: Any) -> Output:
    kind = computed_in(b, x, y)
    if not b.kind.is_real():
        return b.cast(integers.floor_divide(b, b.cast(x, kind), _divisor(b, y, kind)), b.kind)
    # Computed from the remainder, as in torch and Python, so that an infinite x gives NaN.
    x, y = b.cast(x, ov.Type.f32), b.cast(y, ov.Type.f32)
    rest = op.floor_mod(x, y)
    quotient = op.round(op.divide(op.subtract(x, rest), y), "half_to_even")
    by_zero = op.equal(y, b.scalar(0.0, ov.Type.f32))
    return b.cast(op.select(by_zero, op.divide(x, y), quotient).output(0), b.kind)


def _remainder(of_floats: Any, of_integers: Any) -> Build:
    def build(b: Builder, x: Any, y: Any) -> Output:
        kind = computed_in(b, x, y)
        if b.kind.is_real():
            return b.cast(of_floats(b.cast(x, kind), b.cast(y, kind)).output(0), b.kind)
        return b.cast(of_integers(b, b.cast(x, kind), _divisor(b, y, kind)), b.kind)

    return build


_packet = aten.remainder
lowers(_packet.Tensor, _packet.Scalar, _packet.Scalar_Tensor, refuses=_exact)(
    _remainder(op.floor_mod, integers.remainder)
)
lowers(aten.fmod.Tensor, aten.fmod.Scalar, refuses=_exact)(
    _remainder(op.mod, lambda b, x, y: integers.truncated(b, x, y)[1])
)


def _small_power_or_float(call: Call) -> str | None:
    if call.result.is_floating_point():
        return None
    exponent = call.fake("exponent")
    if isinstance(exponent, int) and 0 <= exponent <= 4:
        return None
    return "it raises integers to a power, which OpenVINO computes in float32"


@lowers(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar, refuses=_small_power_or_float)
def power(b: Builder, x: Any, exponent: Any) -> Output:
    if isinstance(exponent, (int, float)) and exponent in (0, 1, 2, 3, 4):
        return _product(b, x, int(exponent))
    kind = computed_in(b, x, exponent)
    if exponent == 0.5:
        return b.cast(op.sqrt(b.cast(x, kind)).output(0), b.kind)
    return b.cast(op.power(b.cast(x, kind), b.cast(exponent, kind)).output(0), b.kind)


@lowers(aten.square.default)
def _product(b: Builder, x: Any, times: int = 2) -> Output:
    """Return x to the power of ``times``, at most 4."""
    kind = integers.computed_in(b.kind)
    x = b.cast(x, kind)
    if times == 0:
        return b.full(1, op.shape_of(x))
    result = x if times % 2 else None
    if times >= 2:
        square = op.multiply(x, x).output(0)
        result = op.multiply(square, square if times == 4 else result).output(0) if times > 2 else square
    assert result is not None
    return b.cast(result, b.kind)


def keeping_nan(result: Output, *operands: Output) -> Output:
    """Return ``result``, but NaN where an operand is NaN: the CPU plugin's maxima and minima lose NaN."""
    for operand in operands:
        if operand.get_element_type().is_real() and operand.get_node().get_type_name() != "Constant":
            result = op.select(op.is_nan(operand), operand, result).output(0)
    return result


@lowers(aten.clamp.default, aten.clamp.Tensor, aten.clip.default, aten.clip.Tensor)
@lowers(aten.clamp_min.default, aten.clamp_min.Tensor, aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp(b: Builder, x: Any, *, min: Any = None, max: Any = None) -> Output:
    kind = computed_in(b, x, min, max)
    result = x = b.cast(x, kind)
    bounds: list[Output] = []
    for function, bound in ((op.maximum, min), (op.minimum, max)):
        if bound is not None:
            bounds.append(b.cast(bound, kind))
            result = function(result, bounds[-1]).output(0)
    return b.cast(keeping_nan(result, x, *bounds), b.kind)


@lowers(aten.addcmul.default)
def addcmul(b: Builder, x: Any, y: Any, z: Any, value: Any = 1) -> Output:
    kind = computed_in(b, value)
    product = op.multiply(b.cast(y, kind), b.cast(z, kind)).output(0)
    if isinstance(value, Output) or value != 1:
        product = op.multiply(product, b.cast(value, kind)).output(0)
    return b.cast(op.add(b.cast(x, kind), product).output(0), b.kind)


@lowers(aten.addcdiv.default)
def addcdiv(b: Builder, x: Any, y: Any, z: Any, value: Any = 1) -> Output:
    kind = computed_in(b, value)
    quotient = op.divide(op.multiply(b.cast(y, kind), b.cast(value, kind)), b.cast(z, kind))
    return b.cast(op.add(b.cast(x, kind), quotient).output(0), b.kind)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(b: Builder, x: Any, end: Any, weight: Any) -> Output:
    """Interpolate from ``x`` to ``end``, so that weight 0 gives exactly x and weight 1 exactly end.

    As in torch, the formula starts from x if abs(weight) < 0.5, otherwise from end.
    """
    kind = ov.Type.f32 if b.kind in SHORT else b.kind
    x, end, weight = (b.cast(value, kind) for value in (x, end, weight))
    way = op.subtract(end, x)
    from_start = op.add(x, op.multiply(weight, way))
    from_end = op.subtract(end, op.multiply(way, op.subtract(b.scalar(1.0, kind), weight)))
    near = op.less(op.abs(weight), b.scalar(0.5, kind))
    return b.cast(op.select(near, from_start, from_end).output(0), b.kind)


def _truncate(b: Builder, x: Output) -> Output:
    negative = op.less(x, b.scalar(0.0, x.get_element_type()))
    return op.select(negative, op.ceiling(x), op.floor(x)).output(0)


lowers(*defaults("trunc fix"))(lambda b, x: _truncate(b, x) if b.kind.is_real() else x)
lowers(aten.frac.default)(lambda b, x: op.subtract(x, _truncate(b, x)).output(0))
