"""Comparisons, logic, bits, and selection between two tensors."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output
from torch import Tensor

from dlinfer.vendor.openvino import dtypes
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.dtypes import SHORT
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.registry import Build, defaults, lowers

aten = torch.ops.aten


def _stand_in(value: Any) -> Any:
    """Return a number, or a tensor of one element, with the same effect on type promotion as ``value``."""
    if isinstance(value, Tensor):
        return torch.empty((1,) * value.dim(), dtype=value.dtype, device="meta")
    if isinstance(value, (bool, torch.SymBool)):
        return True
    return 1.0 if isinstance(value, (float, torch.SymFloat)) else 1


def common_type(b: Builder) -> ov.Type:
    return dtypes.type_of(torch.result_type(*(_stand_in(b.call.fake(name)) for name in ("self", "other"))))


def _compares(function: Any) -> Build:
    def build(b: Builder, x: Any, y: Any) -> Any:
        kind = common_type(b)
        if kind == ov.Type.boolean:
            kind = ov.Type.i32  # OpenVINO does not order bools
            return function(_wide(b, x, kind), _wide(b, y, kind))
        if kind.is_real():
            operands = (b.cast(value, kind) if isinstance(value, Output) else value for value in (x, y))
            return function(*(_exact(b, operand, kind) for operand in operands))
        return function(*integers.difference(b, x, y, kind))

    return build


def _exact(b: Builder, x: Any, kind: ov.Type) -> Output:
    """Return a value in a type that compares exactly: float32 for bfloat16, else ``kind``.

    If the CPU plugin itself widened a bfloat16 constant, infinity would become the largest finite number."""
    if not isinstance(x, Output) and kind in SHORT:
        x = float(torch.tensor(x, dtype=SHORT[kind]))  # what torch compares with
    return b.cast(x, ov.Type.f32 if kind == ov.Type.bf16 else kind)


def _wide(b: Builder, x: Any, kind: ov.Type) -> Output:
    return b.cast(b.cast(x, ov.Type.boolean), kind)


def greater(x: Any, y: Any) -> Output:
    """Return x > y, computed as y < x: with AVX-512 the CPU plugin's own Greater is true for NaN."""
    return op.less(y, x).output(0)


def greater_equal(x: Any, y: Any) -> Output:
    """Return x >= y, computed as y <= x for the same reason as in ``greater``."""
    return op.less_equal(y, x).output(0)


for _packet, _function in {
    aten.eq: op.equal,
    aten.ne: op.not_equal,
    aten.not_equal: op.not_equal,
    aten.lt: op.less,
    aten.less: op.less,
    aten.le: op.less_equal,
    aten.gt: greater,
    aten.greater: greater,
    aten.ge: greater_equal,
}.items():
    lowers(_packet.Tensor, _packet.Scalar)(_compares(_function))


def _logic(function: Any) -> Build:
    return lambda b, *values: function(*(b.cast(value, ov.Type.boolean) for value in values)).output(0)


for _name in ("logical_and", "logical_or", "logical_xor", "logical_not"):
    lowers(*defaults(_name))(_logic(getattr(op, _name)))


def _bits(logic: Any, bits: Any) -> Build:
    def build(b: Builder, *values: Any) -> Output:
        function = logic if b.kind == ov.Type.boolean else bits
        return function(*(b.cast(value, b.kind) for value in values)).output(0)

    return build


for _packet, _bools, _integers in (
    (aten.bitwise_and, op.logical_and, op.bitwise_and),
    (aten.__and__, op.logical_and, op.bitwise_and),
    (aten.bitwise_or, op.logical_or, op.bitwise_or),
    (aten.__or__, op.logical_or, op.bitwise_or),
    (aten.bitwise_xor, op.logical_xor, op.bitwise_xor),
    (aten.__xor__, op.logical_xor, op.bitwise_xor),
):
    lowers(_packet.Tensor, _packet.Scalar)(_bits(_bools, _integers))
lowers(aten.bitwise_not.default)(_bits(op.logical_not, op.bitwise_not))


lowers(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)(
    lambda b, condition, x, y: b.select(b.cast(condition, ov.Type.boolean), x, y, b.kind)
)
lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)(
    lambda b, x, mask, value: b.select(mask, value, x, b.kind)
)
lowers(aten.isnan.default)(lambda b, x: op.not_equal(x, x).output(0))


def _to_infinity(compares: Any, of_integers: Any) -> Build:
    """Return a lowering that compares the absolute values of floats with infinity, by ``compares``.

    of_integers: the op for an integer x, which is never infinite. It compares x with x: ``equal`` gives True for all
        elements, ``not_equal`` gives False."""

    def build(b: Builder, x: Output) -> Output:
        kind = x.get_element_type()
        if not kind.is_real():
            return of_integers(x, x).output(0)
        return compares(op.abs(_exact(b, x, kind)), _exact(b, float("inf"), kind)).output(0)

    return build


lowers(aten.isinf.default)(_to_infinity(op.equal, op.not_equal))
lowers(aten.isfinite.default)(_to_infinity(op.less, op.equal))
