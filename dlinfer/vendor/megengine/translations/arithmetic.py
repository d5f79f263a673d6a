"""Arithmetic and comparisons, element by element."""

import math
from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value
from dlinfer.vendor.megengine.translations.table import (
    TABLE,
    Translation,
    aten,
    broadcast,
    float32,
    full,
    translation,
    truth,
)

_UNARY = {
    "neg": aten.neg.default,
    "exp": aten.exp.default,
    "log": aten.log.default,
    "sqrt": aten.sqrt.default,
    "abs": aten.abs.default,
    "sin": aten.sin.default,
    "cos": aten.cos.default,
    "tanh": aten.tanh.default,
    "sigmoid": aten.sigmoid.default,
    "relu": aten.relu.default,
}


def _unary(kind: str) -> Translation:
    def write(writer: NodeList, result: Tensor, self: Value) -> Value:
        float32(self)
        return writer.op(kind, self, like=result)

    return write


for _kind, _op in _UNARY.items():
    TABLE[_op] = _unary(_kind)


def _binary(kind: str) -> Translation:
    def write(writer: NodeList, result: Tensor, self: Any, other: Any, alpha: float = 1) -> Value:
        float32(self, other)
        if alpha != 1:
            other = writer.op("mul", other, alpha, like=other) if isinstance(other, Value) else other * alpha
        return writer.op(kind, self, other, like=result)

    return write


for _kind, _ops in {
    "add": (aten.add.Tensor, aten.add.Scalar),
    "sub": (aten.sub.Tensor, aten.sub.Scalar),
    "mul": (aten.mul.Tensor, aten.mul.Scalar),
    "maximum": (aten.maximum.default,),
    "minimum": (aten.minimum.default,),
}.items():
    for _op in _ops:
        TABLE[_op] = _binary(_kind)


@translation(aten.div.Tensor, aten.div.Scalar)
def _div(writer: NodeList, result: Tensor, self: Value, other: Any) -> Value:
    float32(self, other)
    return writer.op("div", self, other, like=result)


@translation(aten.rsub.Scalar)
def _rsub(writer: NodeList, result: Tensor, self: Value, other: float, alpha: float = 1) -> Value:
    float32(self)
    return writer.op("sub", other, writer.op("mul", self, alpha, like=self), like=result)


@translation(aten.pow.Tensor_Scalar)
def _pow(writer: NodeList, result: Tensor, self: Value, exponent: float) -> Value:
    float32(self)
    if exponent == 2:
        return writer.op("mul", self, self, like=result)
    if exponent in (0.5, -0.5):
        root = writer.op("sqrt", self, like=result)
        return root if exponent > 0 else writer.op("div", 1.0, root, like=result)
    raise UntranslatableError(f"a power of {exponent}: MegEngine's differs for negative numbers")


@translation(aten.rsqrt.default)
def _rsqrt(writer: NodeList, result: Tensor, self: Value) -> Value:
    float32(self)
    return writer.op("div", 1.0, writer.op("sqrt", self, like=result), like=result)


@translation(aten.reciprocal.default)
def _reciprocal(writer: NodeList, result: Tensor, self: Value) -> Value:
    float32(self)
    return writer.op("div", 1.0, self, like=result)


def _compare(kind: str) -> Translation:
    def write(writer: NodeList, result: Tensor, self: Value, other: Any) -> Value:
        float32(self, other)
        return writer.op(kind, self, other, like=result, dtype=torch.bool)

    return write


for _kind, _name in {
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
}.items():
    TABLE[getattr(aten, _name).Tensor] = TABLE[getattr(aten, _name).Scalar] = _compare(_kind)


@translation(aten.clamp.default)
def _clamp(
    writer: NodeList, result: Tensor, self: Value, min: float | None = None, max: float | None = None
) -> Value:
    float32(self)
    for kind, bound in (("maximum", min), ("minimum", max)):
        if bound is not None:
            self = writer.op(kind, self, bound, like=result)
    return self


@translation(aten.masked_fill.Scalar)
def _masked_fill(writer: NodeList, result: Tensor, self: Value, mask: Value, value: float) -> Value:
    float32(self)
    if not math.isfinite(value):
        raise UntranslatableError(f"{value} as a number: it is no JSON, and MegEngine's softmax of it is NaN")
    return _where(writer, result, mask, full(writer, result, value), self)


@translation(aten.where.self)
def _where(writer: NodeList, result: Tensor, condition: Value, self: Value, other: Value) -> Value:
    float32(self, other)
    picks = [broadcast(writer, one, tuple(result.shape)) for one in (truth(writer, condition), self, other)]
    return writer.op("where", *picks, like=result, dtype=torch.float32)
