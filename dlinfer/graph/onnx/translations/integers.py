"""Translate quotients, and ops on integers and bools that ONNX or its runtimes have for floats only."""

from collections.abc import Sequence
from functools import partial

import torch

from dlinfer.graph.onnx.translations.writing import Untranslated, Value, is_type, number, op, rank, translates

_aten = torch.ops.aten
_INTEGERS = ("INT64", "INT32", "INT16", "INT8", "UINT8", "BOOL")


def _rounded(name: str, self: Value) -> Value:
    """Round floats by the ONNX op ``name``, and return integers unchanged. ``Round`` rounds halves to even."""
    return op.Identity(self) if is_type(self, *_INTEGERS) else getattr(op, name)(self)


translates(_aten.ceil.default)(partial(_rounded, "Ceil"))
translates(_aten.floor.default)(partial(_rounded, "Floor"))
translates(_aten.round.default)(partial(_rounded, "Round"))


@translates(_aten.trunc.default)
def trunc(self: Value) -> Value:
    if is_type(self, *_INTEGERS):
        return op.Identity(self)
    if not is_type(self, "FLOAT", "DOUBLE", "FLOAT16"):
        raise Untranslated(f"the argument of trunc has type {self.dtype}")
    return _cut(self)


@translates(_aten.frac.default)
def frac(self: Value) -> Value:
    """Return the fraction that ``trunc`` cuts off."""
    return op.Sub(self, trunc(self))


def _cut(x: Value) -> Value:
    """Round towards zero. A result of 0 has the sign of x."""
    negative = op.Less(x, op.CastLike(op.Constant(value_float=0.0), x))
    return op.Where(negative, op.Ceil(x), op.Floor(x))


def _floored(x: Value, y: Value) -> Value:
    """Return the floor of ``x / y`` as torch does: subtract the remainder first, so that no quotient rounds up."""
    zero, half = (op.CastLike(op.Constant(value_float=value), x) for value in (0.0, 0.5))
    quotient = op.Div(x, y)
    rest = op.Mod(x, y, fmod=1)
    below = op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(y, zero)))
    exact = op.Sub(op.Div(op.Sub(x, rest), y), op.CastLike(below, x))
    whole = op.Floor(exact)
    whole = op.Add(whole, op.CastLike(op.Greater(op.Sub(exact, whole), half), x))
    whole = op.Where(op.Equal(exact, zero), op.Mul(quotient, zero), whole)  # the sign of a zero
    return op.Where(op.Equal(y, zero), quotient, whole)


@translates(_aten.div.Tensor_mode, _aten.div.Scalar_mode)
def div_mode(self: Value, other: Value, rounding_mode: str | None = None) -> Value:
    """Return ``self / other``, rounded by ``rounding_mode``. Integers are divided as integers, to stay exact."""
    kinds = {self.dtype, self.dtype if isinstance(other, (int, float)) else other.dtype}
    if isinstance(other, (int, float)):
        if isinstance(other, float) and is_type(self, *_INTEGERS):
            raise Untranslated("it divides integers by a float")
        other = number(other, self)
    if not is_type(self, *_INTEGERS):
        if rounding_mode is None:
            return op.Div(self, other)
        x, y = (op.Cast(value, to=1) if is_type(self, "FLOAT16") else value for value in (self, other))
        return op.CastLike(_floored(x, y) if rounding_mode == "floor" else _cut(op.Div(x, y)), self)
    if rounding_mode is None or len(kinds) > 1 or is_type(self, "BOOL"):
        raise Untranslated(f"it divides {' and '.join(map(str, kinds))} with rounding_mode {rounding_mode}")
    narrow = not is_type(self, "INT64", "INT32")  # runtimes divide these two only
    x, y = (op.Cast(value, to=6) if narrow else value for value in (self, other))
    quotient = op.Div(x, y)  # towards zero
    if rounding_mode == "floor":
        zero = op.CastLike(op.Constant(value_int=0), x)
        rest = op.Sub(x, op.Mul(quotient, y))
        below = op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(y, zero)))
        quotient = op.Sub(quotient, op.CastLike(below, x))
    return op.CastLike(quotient, self)


@translates(_aten.floor_divide.default, _aten.floor_divide.Scalar)
def floor_divide(self: Value, other: Value) -> Value:
    return div_mode(self, other, "floor")


@translates(_aten.where.self)
def where(condition: Value, self: Value, other: Value) -> Value:
    """Return ``self`` where the condition is true, and ``other`` elsewhere.

    Bools are chosen with logical ops, because runtimes have no Where for bools.
    """
    if not is_type(self, "BOOL"):
        return op.Where(condition, self, other)
    return op.Or(op.And(condition, self), op.And(op.Not(condition), other))


@translates(_aten.isnan.default)
def isnan(self: Value) -> Value:
    return _all(self, False) if is_type(self, *_INTEGERS) else op.IsNaN(self)


@translates(_aten.isinf.default)
def isinf(self: Value) -> Value:
    return _all(self, False) if is_type(self, *_INTEGERS) else op.IsInf(self)


@translates(_aten.isfinite.default)
def isfinite(self: Value) -> Value:
    if is_type(self, *_INTEGERS):
        return _all(self, True)
    return op.Not(op.Or(op.IsNaN(self), op.IsInf(self)))


def _all(x: Value, value: bool) -> Value:
    return op.Expand(op.Cast(op.Constant(value_int=int(value)), to=9), op.Shape(x))


@translates(_aten.logsumexp.default)
def logsumexp(self: Value, dim: Sequence[int], keepdim: bool = False) -> Value:
    """Return the logarithm of the sum of exponentials over ``dim``. Integers are cast to float32."""
    x = op.Cast(self, to=1) if is_type(self, *_INTEGERS) else self
    if rank(self) == 0:
        return op.Identity(x)
    axes = list(dim) or list(range(rank(self)))
    return op.ReduceLogSumExp(x, op.Constant(value_ints=axes), keepdims=int(keepdim))
