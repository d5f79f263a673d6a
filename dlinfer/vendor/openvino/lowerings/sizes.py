"""Arithmetic on sizes. Integers are i64 scalars of the model, or Python numbers if they are fixed."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.registry import Build, Call, Check, lowers, taken, unless

aten = torch.ops.aten
I64, F32, BOOL = ov.Type.i64, ov.Type.f32, ov.Type.boolean


lowers(aten.sym_size.int)(lambda b, x, dim: b.size(x, dim))
lowers(operator.getitem)(lambda b, values, index: values[index])


@lowers(aten.sym_numel.default)
def sym_numel(b: Builder, x: Output) -> Output:
    return op.reduce_prod(op.shape_of(x, "i64"), b.axes([0]), False).output(0)


def _on_numbers(*targets: Any, python: Any = None, refuses: Check = taken) -> Callable[[Build], Build]:
    """Register the decorated function as the lowering of ``targets``.

    If all operands of a call are Python numbers, ``python`` or else the first target computes the result at once.
    """

    def register(build: Build) -> Build:
        def either(b: Builder, *values: Any) -> Any:
            known = not any(isinstance(value, Output) for value in values)
            return (python or targets[0])(*values) if known else build(b, *values)

        return lowers(*targets, refuses=refuses)(either)

    return register


def _kind(b: Builder) -> ov.Type:
    whole = isinstance(b.call.result, (int, torch.SymInt)) and not isinstance(b.call.result, bool)
    return I64 if whole else F32


def _computes(function: Any, kind: ov.Type | None = None) -> Build:
    """Return a lowering that applies ``function`` to operands of type ``kind``; None means the result's type."""
    return lambda b, *values: function(*(b.cast(value, kind or _kind(b)) for value in values)).output(0)


add = _on_numbers(operator.add)(_computes(op.add))
for _target, _function, _type in (
    (operator.sub, op.subtract, None),
    (operator.mul, op.multiply, None),
    (operator.neg, op.negative, None),
    (operator.abs, op.abs, None),
    (torch.sym_max, op.maximum, None),
    (torch.sym_min, op.minimum, None),
    (operator.truediv, op.divide, F32),
    (operator.and_, op.logical_and, BOOL),
    (operator.or_, op.logical_or, BOOL),
):
    _on_numbers(_target)(_computes(_function, _type))


@lowers(torch.sym_sum)
def sym_sum(b: Builder, values: list[Any]) -> Any:
    return functools.reduce(lambda x, y: add(b, x, y), values)


_on_numbers(operator.floordiv)(lambda b, x, y: integers.floor_divide(b, b.cast(x, I64), y))
_on_numbers(operator.mod)(lambda b, x, y: integers.remainder(b, b.cast(x, I64), y))
_on_numbers(torch.sym_float, python=float)(lambda b, x: b.cast(x, F32))
_on_numbers(torch.sym_not, operator.not_, python=operator.not_)(lambda b, x: op.logical_not(x).output(0))


def _small_power(call: Call) -> str | None:
    small = isinstance(call.fake(1), int) and call.fake(1) > 0
    whole = isinstance(call.result, (int, torch.SymInt))
    return None if small or not whole else "it raises sizes to a power, which OpenVINO computes in 32 bits"


@_on_numbers(operator.pow, refuses=_small_power)
def pow_(b: Builder, x: Any, y: Any) -> Output:
    if isinstance(y, int) and y > 0:
        power = x
        for _ in range(y - 1):
            power = _computes(op.multiply)(b, power, x)
        return power
    return b.cast(op.power(b.cast(x, F32), b.cast(y, F32)).output(0), _kind(b))


def _rounds(function: Any) -> Build:
    def build(b: Builder, x: Output) -> Output:
        return b.cast(function(x).output(0), I64) if x.get_element_type().is_real() else x

    return build


_of_whole = unless(
    lambda call: not isinstance(call.fake(0), torch.SymFloat),
    "it rounds a float to a size, which OpenVINO computes in 32 bits",
)


for _target, _python, _function in (
    (torch.sym_int, int, lambda x: x),
    (math.trunc, int, lambda x: x),
    (math.floor, math.floor, op.floor),
    (math.ceil, math.ceil, op.ceiling),
    (round, round, lambda x: op.round(x, "half_to_even")),
):
    _on_numbers(_target, python=_python, refuses=_of_whole)(_rounds(_function))


def _compares(function: Any) -> Build:
    def build(b: Builder, x: Any, y: Any) -> Output:
        kinds = [value.get_element_type() if isinstance(value, Output) else None for value in (x, y)]
        real = isinstance(x, float) or isinstance(y, float) or any(kind and kind.is_real() for kind in kinds)
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
    _on_numbers(_target)(_compares(_function))


@lowers(torch.sym_ite)
def sym_ite(b: Builder, condition: Any, x: Any, y: Any) -> Any:
    if not isinstance(condition, Output):
        return x if condition else y
    return op.select(condition, b.cast(x, _kind(b)), b.cast(y, _kind(b))).output(0)
