"""Ops of whole numbers and bools that ONNX, or its runtimes, have for floating ones only, and quotients."""

from collections.abc import Sequence

import torch

from dlinfer.graph.onnx.translations.writing import Table, Untranslated, Value, is_type, number, opset, rank

_aten = torch.ops.aten
_INTEGERS = ("INT64", "INT32", "INT16", "INT8", "UINT8", "BOOL")


def table() -> Table:
    """Translations by op."""
    return {
        _aten.ceil.default: ceil,
        _aten.floor.default: floor,
        _aten.round.default: round_,
        _aten.trunc.default: trunc,
        _aten.frac.default: frac,
        _aten.div.Tensor_mode: div_mode,
        _aten.div.Scalar_mode: div_mode,
        _aten.floor_divide.default: floor_divide,
        _aten.floor_divide.Scalar: floor_divide,
        _aten.where.self: where,
        _aten.isnan.default: isnan,
        _aten.isfinite.default: isfinite,
        _aten.isinf.default: isinf,
        _aten.logsumexp.default: logsumexp,
    }


def ceil(self: Value) -> Value:
    """Whole numbers stay what they are."""
    return opset().Identity(self) if is_type(self, *_INTEGERS) else opset().Ceil(self)


def floor(self: Value) -> Value:
    """Whole numbers stay what they are."""
    return opset().Identity(self) if is_type(self, *_INTEGERS) else opset().Floor(self)


def round_(self: Value) -> Value:
    """Whole numbers stay what they are; halves go to the even neighbour."""
    return opset().Identity(self) if is_type(self, *_INTEGERS) else opset().Round(self)


def trunc(self: Value) -> Value:
    """Towards zero."""
    op = opset()
    if is_type(self, *_INTEGERS):
        return op.Identity(self)
    if not is_type(self, "FLOAT", "DOUBLE", "FLOAT16"):
        raise Untranslated(f"trunc of {self.dtype}")
    return _cut(self)


def frac(self: Value) -> Value:
    """What trunc cuts off."""
    return opset().Sub(self, trunc(self))


def _cut(x: Value) -> Value:
    """Towards zero, with the sign of x where the result is 0."""
    op = opset()
    negative = op.Less(x, op.CastLike(op.Constant(value_float=0.0), x))
    return op.Where(negative, op.Ceil(x), op.Floor(x))


def _floored(x: Value, y: Value) -> Value:
    """What torch takes for the floor of a quotient: of that without the rest, which is not rounded up to the next."""
    op = opset()
    zero, half = (op.CastLike(op.Constant(value_float=value), x) for value in (0.0, 0.5))
    quotient = op.Div(x, y)
    rest = op.Mod(x, y, fmod=1)
    below = op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(y, zero)))
    exact = op.Sub(op.Div(op.Sub(x, rest), y), op.CastLike(below, x))
    whole = op.Floor(exact)
    whole = op.Add(whole, op.CastLike(op.Greater(op.Sub(exact, whole), half), x))
    whole = op.Where(op.Equal(exact, zero), op.Mul(quotient, zero), whole)  # the sign of a zero
    return op.Where(op.Equal(y, zero), quotient, whole)


def div_mode(self: Value, other: Value, rounding_mode: str | None = None) -> Value:
    """Whole numbers are divided as such: floats do not hold all of them."""
    op = opset()
    kinds = {self.dtype, self.dtype if isinstance(other, (int, float)) else other.dtype}
    if isinstance(other, (int, float)):
        if isinstance(other, float) and is_type(self, *_INTEGERS):
            raise Untranslated("whole numbers divided by a float")
        other = number(other, self)
    if not is_type(self, *_INTEGERS):
        if rounding_mode is None:
            return op.Div(self, other)
        x, y = (op.Cast(one, to=1) if is_type(self, "FLOAT16") else one for one in (self, other))
        return op.CastLike(_floored(x, y) if rounding_mode == "floor" else _cut(op.Div(x, y)), self)
    if rounding_mode is None or len(kinds) > 1 or is_type(self, "BOOL"):
        raise Untranslated(f"{' and '.join(map(str, kinds))} divided, rounded by {rounding_mode}")
    narrow = not is_type(self, "INT64", "INT32")  # runtimes divide these two only
    x, y = (op.Cast(one, to=6) if narrow else one for one in (self, other))
    made = op.Div(x, y)  # towards zero
    if rounding_mode == "floor":
        zero = op.CastLike(op.Constant(value_int=0), x)
        rest = op.Sub(x, op.Mul(made, y))
        below = op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(y, zero)))
        made = op.Sub(made, op.CastLike(below, x))
    return op.CastLike(made, self)


def floor_divide(self: Value, other: Value) -> Value:
    """The quotient rounded down."""
    return div_mode(self, other, "floor")


def where(condition: Value, self: Value, other: Value) -> Value:
    """Of bools by logic: runtimes have no kernel for them."""
    op = opset()
    if not is_type(self, "BOOL"):
        return op.Where(condition, self, other)
    return op.Or(op.And(condition, self), op.And(op.Not(condition), other))


def isnan(self: Value) -> Value:
    """Never of a whole number."""
    op = opset()
    return _constant(self, False) if is_type(self, *_INTEGERS) else op.IsNaN(self)


def isinf(self: Value) -> Value:
    """Never of a whole number."""
    op = opset()
    return _constant(self, False) if is_type(self, *_INTEGERS) else op.IsInf(self)


def isfinite(self: Value) -> Value:
    """Always of a whole number."""
    op = opset()
    if is_type(self, *_INTEGERS):
        return _constant(self, True)
    return op.Not(op.Or(op.IsNaN(self), op.IsInf(self)))


def _constant(x: Value, value: bool) -> Value:
    op = opset()
    return op.Expand(op.Cast(op.Constant(value_int=int(value)), to=9), op.Shape(x))


def logsumexp(self: Value, dim: Sequence[int], keepdim: bool = False) -> Value:
    """Of whole numbers in float32."""
    op = opset()
    x = op.Cast(self, to=1) if is_type(self, *_INTEGERS) else self
    if rank(self) == 0:
        return op.Identity(x)
    axes = list(dim) or list(range(rank(self)))
    return op.ReduceLogSumExp(x, op.Constant(value_ints=axes), keepdims=int(keepdim))
