"""Translate maxima and minima: those over dimensions (``amax``), and elementwise ones that skip NaNs (``fmax``)."""

from collections.abc import Sequence

import torch

from dlinfer.graph.onnx.translations.writing import Value, is_type, op, rank, translates

_aten = torch.ops.aten


@translates(_aten.amax.default, _aten.max.default)
def amax(self: Value, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    """Return the maximum over the dimensions ``dim``, or over all if ``dim`` is empty."""
    return _reduced("ReduceMax", self, dim, keepdim)


@translates(_aten.amin.default, _aten.min.default)
def amin(self: Value, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    """Return the minimum over the dimensions ``dim``, or over all if ``dim`` is empty."""
    return _reduced("ReduceMin", self, dim, keepdim)


@translates(_aten.aminmax.default)
def aminmax(self: Value, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    """Return the minimum and the maximum over a dimension, or over all dimensions if ``dim`` is None."""
    dims = () if dim is None else (dim,)
    return amin(self, dims, keepdim), amax(self, dims, keepdim)


def _reduced(name: str, x: Value, dim: Sequence[int], keepdim: bool) -> Value:
    if rank(x) == 0:
        return op.Identity(x)
    axes = list(dim) or list(range(rank(x)))
    number = op.Cast(x, to=6) if is_type(x, "BOOL") else x  # only later opsets have ReduceMax of bool
    result = getattr(op, name)(number, op.Constant(value_ints=axes), keepdims=int(keepdim))
    return op.Cast(result, to=9) if is_type(x, "BOOL") else result


@translates(_aten.fmax.default)
def fmax(self: Value, other: Value) -> Value:
    """Return the larger of each two elements. If one of them is NaN, return the other."""
    return _of_numbers("Max", self, other)


@translates(_aten.fmin.default)
def fmin(self: Value, other: Value) -> Value:
    """Return the smaller of each two elements. If one of them is NaN, return the other."""
    return _of_numbers("Min", self, other)


def _of_numbers(name: str, first: Value, second: Value) -> Value:
    chosen = getattr(op, name)(first, second)
    if not is_type(first, "FLOAT", "DOUBLE", "FLOAT16"):
        return chosen
    return op.Where(op.IsNaN(first), second, op.Where(op.IsNaN(second), first, chosen))
