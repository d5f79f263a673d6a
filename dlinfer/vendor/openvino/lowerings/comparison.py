"""Comparisons, logic, bits, choices between two tensors."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output
from torch import Tensor

from dlinfer.vendor.openvino import dtypes
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.registry import lowers

aten = torch.ops.aten

_SHORT = {ov.Type.bf16: torch.bfloat16, ov.Type.f16: torch.float16}


def _stand_in(value: Any) -> Any:
    """A tensor of one element, or a number, that promotes as the value does."""
    if isinstance(value, Tensor):
        return torch.empty((1,) * value.dim(), dtype=value.dtype, device="meta")
    if isinstance(value, (bool, torch.SymBool)):
        return True
    return 1.0 if isinstance(value, (float, torch.SymFloat)) else 1


def common_type(b: Builder, *parameters: str) -> ov.Type:
    """The type that torch promotes some operands of the call to."""
    first, *others = (_stand_in(b.call.fake(name)) for name in parameters)
    dtype = torch.result_type(first, others[0])
    return dtypes.type_of(dtype)


def _compares(function: Any) -> Any:
    def build(b: Builder, x: Any, y: Any) -> Output:
        kind = common_type(b, "self", "other")
        if kind == ov.Type.boolean:
            kind = ov.Type.i32  # OpenVINO orders no bools
            return function(_wide(b, x, kind), _wide(b, y, kind))
        if kind.is_real():
            return function(
                *(_exact(b, b.cast(one, kind) if isinstance(one, Output) else one, kind) for one in (x, y))
            )
        return function(*integers.difference(b, x, y, kind))

    return build


def _exact(b: Builder, x: Any, kind: ov.Type) -> Output:
    """A value as it takes part in a comparison. A bfloat16 goes as float32, which holds it: where the CPU plugin widens
    a constant of that type itself, infinity becomes the largest finite number."""
    if not isinstance(x, Output) and kind in _SHORT:
        x = float(torch.tensor(x, dtype=_SHORT[kind]))  # what torch compares with
    return b.cast(x, ov.Type.f32 if kind == ov.Type.bf16 else kind)


def _wide(b: Builder, x: Any, kind: ov.Type) -> Output:
    return b.cast(b.cast(x, ov.Type.boolean), kind)


def less(x: Any, y: Any) -> Output:
    """x < y."""
    return op.less(x, y).output(0)


def less_equal(x: Any, y: Any) -> Output:
    """x <= y."""
    return op.less_equal(x, y).output(0)


def greater(x: Any, y: Any) -> Output:
    """x > y, which is y < x: the CPU plugin's own Greater says true of NaN where it has AVX-512."""
    return less(y, x)


def greater_equal(x: Any, y: Any) -> Output:
    """x >= y, as ``greater``."""
    return less_equal(y, x)


def equal(x: Any, y: Any) -> Output:
    """x == y."""
    return op.equal(x, y).output(0)


def not_equal(x: Any, y: Any) -> Output:
    """x != y, true of NaN."""
    return op.not_equal(x, y).output(0)


eq = lowers(aten.eq.Tensor, aten.eq.Scalar)(_compares(equal))
ne = lowers(aten.ne.Tensor, aten.ne.Scalar, aten.not_equal.Tensor, aten.not_equal.Scalar)(
    _compares(not_equal)
)
lt = lowers(aten.lt.Tensor, aten.lt.Scalar, aten.less.Tensor, aten.less.Scalar)(_compares(less))
le = lowers(aten.le.Tensor, aten.le.Scalar)(_compares(less_equal))
gt = lowers(aten.gt.Tensor, aten.gt.Scalar, aten.greater.Tensor, aten.greater.Scalar)(_compares(greater))
ge = lowers(aten.ge.Tensor, aten.ge.Scalar)(_compares(greater_equal))


def _logic(function: Any) -> Any:
    def build(b: Builder, x: Output, y: Output) -> Output:
        return function(b.cast(x, ov.Type.boolean), b.cast(y, ov.Type.boolean)).output(0)

    return build


logical_and = lowers(aten.logical_and.default)(_logic(op.logical_and))
logical_or = lowers(aten.logical_or.default)(_logic(op.logical_or))
logical_xor = lowers(aten.logical_xor.default)(_logic(op.logical_xor))


@lowers(aten.logical_not.default)
def logical_not(b: Builder, x: Output) -> Output:
    return op.logical_not(b.cast(x, ov.Type.boolean)).output(0)


def _bits(logic: Any, bits: Any) -> Any:
    def build(b: Builder, x: Any, y: Any) -> Output:
        function = logic if b.kind == ov.Type.boolean else bits
        return function(b.cast(x, b.kind), b.cast(y, b.kind)).output(0)

    return build


bitwise_and = lowers(
    aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.__and__.Tensor, aten.__and__.Scalar
)(_bits(op.logical_and, op.bitwise_and))
bitwise_or = lowers(aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.__or__.Tensor, aten.__or__.Scalar)(
    _bits(op.logical_or, op.bitwise_or)
)
bitwise_xor = lowers(
    aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar, aten.__xor__.Tensor, aten.__xor__.Scalar
)(_bits(op.logical_xor, op.bitwise_xor))


@lowers(aten.bitwise_not.default)
def bitwise_not(b: Builder, x: Output) -> Output:
    return (op.logical_not if b.kind == ov.Type.boolean else op.bitwise_not)(x).output(0)


@lowers(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(b: Builder, condition: Output, x: Any, y: Any) -> Output:
    return b.select(b.cast(condition, ov.Type.boolean), x, y, b.kind)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(b: Builder, x: Output, mask: Output, value: Any) -> Output:
    return b.select(mask, value, x, b.kind)


@lowers(aten.isnan.default)
def isnan(b: Builder, x: Output) -> Output:
    return op.not_equal(x, x).output(0)


@lowers(aten.isinf.default)
def isinf(b: Builder, x: Output) -> Output:
    if not x.get_element_type().is_real():
        return op.not_equal(x, x).output(0)
    return equal(op.abs(_exact(b, x, x.get_element_type())), _infinity(b, x))


@lowers(aten.isfinite.default)
def isfinite(b: Builder, x: Output) -> Output:
    if not x.get_element_type().is_real():
        return op.equal(x, x).output(0)
    return less(op.abs(_exact(b, x, x.get_element_type())), _infinity(b, x))


def _infinity(b: Builder, x: Output) -> Output:
    return _exact(b, float("inf"), x.get_element_type())
