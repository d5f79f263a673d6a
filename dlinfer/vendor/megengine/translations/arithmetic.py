"""Translations of elementwise arithmetic and comparisons."""

import math
from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value
from dlinfer.vendor.megengine.translations.table import (
    Translation,
    aten,
    broadcast,
    float32,
    full,
    translation,
    truth,
)


def _elementwise(kind: str, dtype: torch.dtype | None = None) -> Translation:
    """Return a translation that writes a node of kind ``kind``, with one or two operands.

    ``alpha`` multiplies the last operand. dtype: the result's dtype; None means the first operand's."""

    def write(writer: NodeList, result: Tensor, alpha: float = 1, **operands: Any) -> Value:
        *first, last = operands.values()
        if alpha != 1:
            last = writer.op("mul", last, alpha, like=last) if isinstance(last, Value) else last * alpha
        return writer.op(kind, *first, last, like=result, dtype=dtype)

    return write


for _kind in "neg exp log sqrt abs sin cos tanh sigmoid relu maximum minimum".split():
    translation(getattr(aten, _kind).default)(_elementwise(_kind))
for _kind in "add sub mul div".split():
    translation(getattr(aten, _kind).Tensor, getattr(aten, _kind).Scalar)(_elementwise(_kind))
for _kind, _op in {
    "less": aten.lt,
    "less_equal": aten.le,
    "greater": aten.gt,
    "greater_equal": aten.ge,
    "equal": aten.eq,
    "not_equal": aten.ne,
}.items():
    translation(_op.Tensor, _op.Scalar)(_elementwise(_kind, torch.bool))


translation(aten.rsub.Scalar)(
    lambda writer, result, self, other, alpha=1: writer.op(
        "sub", other, writer.op("mul", self, alpha, like=self), like=result
    )
)
translation(aten.reciprocal.default)(lambda writer, result, self: writer.op("div", 1.0, self, like=result))
translation(aten.rsqrt.default)(lambda writer, result, self: _pow(writer, result, self, -0.5))


@translation(aten.pow.Tensor_Scalar)
def _pow(writer: NodeList, result: Tensor, self: Value, exponent: float) -> Value:
    if exponent == 2:
        return writer.op("mul", self, self, like=result)
    if exponent in (0.5, -0.5):
        root = writer.op("sqrt", self, like=result)
        return root if exponent > 0 else writer.op("div", 1.0, root, like=result)
    raise UntranslatableError(f"the exponent is {exponent}: MegEngine's result differs for negative numbers")


@translation(aten.clamp.default)
def _clamp(
    writer: NodeList, result: Tensor, self: Value, min: float | None = None, max: float | None = None
) -> Value:
    for kind, bound in (("maximum", min), ("minimum", max)):
        if bound is not None:
            self = writer.op(kind, self, bound, like=result)
    return self


@translation(aten.masked_fill.Scalar, mixed=True)
def _masked_fill(writer: NodeList, result: Tensor, self: Value, mask: Value, value: float) -> Value:
    float32(self)
    if not math.isfinite(value):
        raise UntranslatableError(
            f"the fill value is {value}: JSON lacks it, and MegEngine's softmax of it is NaN"
        )
    return _where(writer, result, mask, full(writer, result, value), self)


@translation(aten.where.self, mixed=True)
def _where(writer: NodeList, result: Tensor, condition: Value, self: Value, other: Value) -> Value:
    float32(self, other)
    values = (truth(writer, condition), self, other)
    operands = [broadcast(writer, value, tuple(result.shape)) for value in values]
    return writer.op("where", *operands, like=result, dtype=torch.float32)
