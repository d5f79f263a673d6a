"""Exact integer arithmetic, where OpenVINO's CPU plugin computes in float32.

The plugin keeps i64 as 32 bits (docs/vendors/openvino.md). It computes division, remainders, comparisons, sums and
maxima of integers in float32, which is exact only up to 2**24. Addition, products, shifts, bit operations,
cumulative sums, sorting, and the minimum or maximum of two tensors are exact. The functions here use only these
exact operations."""

from typing import TYPE_CHECKING, Any

import openvino as ov
import openvino.opset16 as op
from openvino import Output

if TYPE_CHECKING:
    from dlinfer.vendor.openvino.builder import Builder

NARROW = (ov.Type.i8, ov.Type.u8, ov.Type.i16)
"""Types that saturate in OpenVINO but wrap around in torch. They are computed in i32; converting back wraps around."""


def computed_in(kind: ov.Type) -> ov.Type:
    return ov.Type.i32 if kind in NARROW else kind


def floor_divide(b: "Builder", x: Output, y: Any) -> Output:
    """Return x // y, rounded down, for i32 or i64 x and a tensor or number y."""
    kind = x.get_element_type()
    if isinstance(y, int) and y > 0 and y & (y - 1) == 0:
        return x if y == 1 else op.bitwise_right_shift(x, b.scalar(y.bit_length() - 1, kind)).output(0)
    y = b.cast(y, kind)
    # A quotient in float32 is off by at most 128 / |y| + 1. Its remainder is small, so a second quotient is exact.
    rough = op.divide(x, y).output(0)
    rest = op.subtract(x, op.multiply(rough, y)).output(0)
    more = _floored(rest, y, kind)
    rest = op.subtract(rest, op.multiply(more, y)).output(0)
    return op.add(op.add(rough, more), _one_less(b, rest, y, kind)).output(0)


def _floored(rest: Output, y: Output, kind: ov.Type) -> Output:
    quotient = op.floor(op.divide(op.convert(rest, "f32"), op.convert(y, "f32")))
    return op.convert(quotient, kind).output(0)


def _one_less(b: "Builder", rest: Output, y: Output, kind: ov.Type) -> Output:
    """Return what to add to a quotient: -1 if ``rest`` and y differ in sign, 1 if ``rest`` is as large as y, else 0."""
    zero = b.scalar(0, kind)
    other_sign = op.less(op.multiply(op.sign(rest), op.sign(y)), zero)
    too_large = op.greater_equal(op.subtract(op.abs(rest), op.abs(y)), zero)
    return op.subtract(
        op.convert(op.logical_and(too_large, op.logical_not(other_sign)), kind), op.convert(other_sign, kind)
    ).output(0)


def remainder(b: "Builder", x: Output, y: Any) -> Output:
    """Return x - floor(x / y) * y, with y's sign."""
    kind = x.get_element_type()
    if isinstance(y, int) and y > 0 and y & (y - 1) == 0:
        return op.bitwise_and(x, b.scalar(y - 1, kind)).output(0)
    quotient = floor_divide(b, x, y)
    return op.subtract(x, op.multiply(quotient, b.cast(y, kind))).output(0)


def truncated(b: "Builder", x: Output, y: Any) -> tuple[Output, Output]:
    """Return two values: the quotient rounded towards zero, and the remainder, which has x's sign."""
    kind = x.get_element_type()
    y = b.cast(y, kind)
    quotient = floor_divide(b, x, y)
    rest = op.subtract(x, op.multiply(quotient, y))
    # Not by absolute values: the smallest integer has none.
    other_sign = op.less(op.multiply(op.sign(rest), op.sign(x)), b.scalar(0, kind))
    one_more = op.convert(other_sign, kind)
    return (op.add(quotient, one_more).output(0), op.subtract(rest, op.multiply(one_more, y)).output(0))


def difference(b: "Builder", x: Any, y: Any, kind: ov.Type) -> tuple[Output, Output]:
    """Return two operands that compare in float32 just as x and y compare exactly.

    If x or y is a fixed number between -2**24 and 2**24, the operands are x and y: float32 has this number exactly, and
    rounds no other integer to it or past it. Otherwise the operands are a number with the sign of x - y, and 0. The
    difference may need 33 bits, so it is computed in halves: x - y = 2 * h + l with h in -2**31..2**31 - 1 and l in
    -1, 0, 1. The sign of x - y is the sign of h, or of l if h is 0."""
    small = [not isinstance(value, Output) and abs(value) < 1 << 24 for value in (x, y)]
    if any(small):
        return b.cast(x, kind), b.cast(y, kind)
    x, y, unit = b.cast(x, kind), b.cast(y, kind), b.scalar(1, kind)
    if kind not in (ov.Type.i32, ov.Type.i64):
        return op.subtract(b.cast(x, ov.Type.i32), b.cast(y, ov.Type.i32)).output(0), b.scalar(0, ov.Type.i32)
    half = op.subtract(op.bitwise_right_shift(x, unit), op.bitwise_right_shift(y, unit))
    rest = op.subtract(op.bitwise_and(x, unit), op.bitwise_and(y, unit))
    sign = op.maximum(op.minimum(half, unit), b.scalar(-1, kind))
    return op.add(op.multiply(sign, b.scalar(2, kind)), rest).output(0), b.scalar(0, kind)
