"""Arithmetic on sizes: whole numbers are i64 scalars, or Python's where they are known."""

import math
import operator
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder, Size
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.registry import Call, lowers

aten = torch.ops.aten
I64, F32, BOOL = ov.Type.i64, ov.Type.f32, ov.Type.boolean


@lowers(aten.sym_size.int)
def sym_size(b: Builder, x: Output, dim: int) -> Size:
    return b.size(x, dim)


@lowers(aten.sym_numel.default)
def sym_numel(b: Builder, x: Output) -> Output:
    return op.reduce_prod(op.shape_of(x, "i64"), b.axes([0]), False).output(0)


def _known(*values: Any) -> bool:
    return not any(isinstance(value, Output) for value in values)


def _is_whole(b: Builder) -> bool:
    return isinstance(b.call.result, (int, torch.SymInt)) and not isinstance(b.call.result, bool)


def _computes(python: Any, function: Any) -> Any:
    """Arithmetic in whole numbers, or in float32 where the result is a float."""

    def build(b: Builder, *values: Any) -> Any:
        if _known(*values):
            return python(*values)
        kind = I64 if _is_whole(b) else F32
        return function(*(b.cast(value, kind) for value in values)).output(0)

    return build


for _target, _function in {
    operator.add: op.add,
    operator.sub: op.subtract,
    operator.mul: op.multiply,
    operator.neg: op.negative,
    operator.abs: op.abs,
    torch.sym_max: op.maximum,
    torch.sym_min: op.minimum,
}.items():
    lowers(_target)(_computes(_target, _function))


@lowers(torch.sym_sum)
def sym_sum(b: Builder, values: list[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = _computes(operator.add, op.add)(b, total, value)
    return total


@lowers(operator.floordiv)
def floordiv(b: Builder, x: Any, y: Any) -> Any:
    return x // y if _known(x, y) else integers.floor_divide(b, b.cast(x, I64), y)


@lowers(operator.mod)
def mod(b: Builder, x: Any, y: Any) -> Any:
    return x % y if _known(x, y) else integers.remainder(b, b.cast(x, I64), y)


@lowers(operator.truediv)
def truediv(b: Builder, x: Any, y: Any) -> Any:
    return x / y if _known(x, y) else op.divide(b.cast(x, F32), b.cast(y, F32)).output(0)


def _small_power(call: Call) -> str | None:
    small = isinstance(call.fake(1), int) and call.fake(1) > 0
    whole = isinstance(call.result, (int, torch.SymInt))
    return None if small or not whole else "a power of sizes, which OpenVINO computes in 32 bits"


@lowers(operator.pow, refuses=_small_power)
def pow_(b: Builder, x: Any, y: Any) -> Any:
    if _known(x, y):
        return x**y
    if isinstance(y, int) and y > 0:
        made = x
        for _ in range(y - 1):
            made = _computes(None, op.multiply)(b, made, x)
        return made
    return b.cast(op.power(b.cast(x, F32), b.cast(y, F32)).output(0), I64 if _is_whole(b) else F32)


@lowers(torch.sym_float)
def sym_float(b: Builder, x: Any) -> Any:
    return float(x) if _known(x) else b.cast(x, F32)


def _rounds(python: Any, function: Any) -> Any:
    def build(b: Builder, x: Any) -> Any:
        if _known(x):
            return python(x)
        if not x.get_element_type().is_real():
            return x
        return b.cast(function(x).output(0), I64)

    return build


def _of_whole(call: Call) -> str | None:
    """Why a number is not rounded: the model has it in float32, and Python in 64 bits."""
    floats = isinstance(call.fake(0), torch.SymFloat)
    return "a size that is rounded from a float, which OpenVINO computes in 32 bits" if floats else None


lowers(torch.sym_int, math.trunc, refuses=_of_whole)(_rounds(int, lambda x: x))
lowers(math.floor, refuses=_of_whole)(_rounds(math.floor, op.floor))
lowers(math.ceil, refuses=_of_whole)(_rounds(math.ceil, op.ceiling))
lowers(round, refuses=_of_whole)(_rounds(round, lambda x: op.round(x, "half_to_even")))


def _compares(python: Any, function: Any) -> Any:
    def build(b: Builder, x: Any, y: Any) -> Any:
        if _known(x, y):
            return python(x, y)
        real = any(
            isinstance(one, float) or (isinstance(one, Output) and one.get_element_type().is_real())
            for one in (x, y)
        )
        if real:
            return function(b.cast(x, F32), b.cast(y, F32)).output(0)
        return function(*integers.difference(b, x, y, I64)).output(0)

    return build


for _target, _function in {
    operator.eq: op.equal,
    operator.ne: op.not_equal,
    operator.lt: op.less,
    operator.le: op.less_equal,
    operator.gt: op.greater,
    operator.ge: op.greater_equal,
}.items():
    lowers(_target)(_compares(_target, _function))


@lowers(torch.sym_not, operator.not_)
def sym_not(b: Builder, x: Any) -> Any:
    return not x if _known(x) else op.logical_not(x).output(0)


@lowers(operator.and_)
def and_(b: Builder, x: Any, y: Any) -> Any:
    return x & y if _known(x, y) else op.logical_and(b.cast(x, BOOL), b.cast(y, BOOL)).output(0)


@lowers(operator.or_)
def or_(b: Builder, x: Any, y: Any) -> Any:
    return x | y if _known(x, y) else op.logical_or(b.cast(x, BOOL), b.cast(y, BOOL)).output(0)


@lowers(torch.sym_ite)
def sym_ite(b: Builder, condition: Any, x: Any, y: Any) -> Any:
    if _known(condition):
        return x if condition else y
    kind = I64 if _is_whole(b) else F32
    return op.select(condition, b.cast(x, kind), b.cast(y, kind)).output(0)


@lowers(operator.getitem)
def getitem(b: Builder, values: Any, index: int) -> Any:
    return values[index]
