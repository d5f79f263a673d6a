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
            return function(_wide(b, x, kind), _wide(b, y, kind)).output(0)
        if kind.is_real():
            return function(b.cast(x, kind), b.cast(y, kind)).output(0)
        return function(*integers.difference(b, x, y, kind)).output(0)

    return build


def _wide(b: Builder, x: Any, kind: ov.Type) -> Output:
    return b.cast(b.cast(x, ov.Type.boolean), kind)


eq = lowers(aten.eq.Tensor, aten.eq.Scalar)(_compares(op.equal))
ne = lowers(aten.ne.Tensor, aten.ne.Scalar, aten.not_equal.Tensor, aten.not_equal.Scalar)(
    _compares(op.not_equal)
)
lt = lowers(aten.lt.Tensor, aten.lt.Scalar, aten.less.Tensor, aten.less.Scalar)(_compares(op.less))
le = lowers(aten.le.Tensor, aten.le.Scalar)(_compares(op.less_equal))
gt = lowers(aten.gt.Tensor, aten.gt.Scalar, aten.greater.Tensor, aten.greater.Scalar)(_compares(op.greater))
ge = lowers(aten.ge.Tensor, aten.ge.Scalar)(_compares(op.greater_equal))


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
    return op.equal(op.abs(x), b.scalar(float("inf"), x.get_element_type())).output(0)


@lowers(aten.isfinite.default)
def isfinite(b: Builder, x: Output) -> Output:
    if not x.get_element_type().is_real():
        return op.equal(x, x).output(0)
    return op.less(op.abs(x), b.scalar(float("inf"), x.get_element_type())).output(0)
