"""Maximum, minimum, their indices, topk and clamp for operands with NaN, which ONNX Runtime's ops ignore.

The results are torch's: topk treats NaN as the largest value, and the maximum and minimum of numbers with a NaN are
NaN, at the index of the first NaN.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dlinfer.graph.onnx.translations import extremes
from dlinfer.graph.onnx.translations.writing import Untranslated, is_type, number, op, rank, wide

_aten = torch.ops.aten


def amax(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """Write the maximum over ``dim``, or over all dimensions if ``dim`` is empty."""
    return _with_nan(extremes.amax(self, dim, keepdim), self, dim, keepdim)


def amin(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return _with_nan(extremes.amin(self, dim, keepdim), self, dim, keepdim)


def aminmax(self: Any, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    dims = () if dim is None else (dim,)
    return amin(self, dims, keepdim), amax(self, dims, keepdim)


def _of_dim(extreme: Any, name: str) -> Any:
    """Return the translation of ``max.dim`` or ``min.dim``, which writes the value and its index.

    extreme: the translation that writes the value. name: the ONNX op that finds the index.
    """

    def translate(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        return extreme(self, (dim,), keepdim), _place(name, self, dim, keepdim)

    return translate


def topk(self: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Any, Any]:
    """Write TopK on a sort key. The key is infinity for NaN, and the largest float32 for infinity."""
    count = op.Constant(value_ints=[k]) if isinstance(k, int) else op.Reshape(k, op.Constant(value_ints=[1]))
    if rank(self) == 0:
        return op.Identity(self), op.Constant(value_int=0)
    if not _is_float(self):
        return op.TopK(self, count, axis=dim, largest=int(largest), sorted=1)
    x, _ = wide(self)
    high = op.Constant(value_float=torch.finfo(torch.float32).max)
    key = op.Where(op.IsNaN(x), op.Constant(value_float=float("inf")), op.Min(x, high))
    _, place = op.TopK(key, count, axis=dim, largest=int(largest), sorted=1)
    return op.GatherElements(self, place, axis=dim), place


def clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """Write a clamp between two tensors. One of them may be None.

    If ``self`` or a bound is NaN, the result is NaN. If ``self`` equals a bound, the result is ``self``, which keeps
    the sign of a zero.
    """
    result = self
    if _is_float(self):
        half = is_type(self, "FLOAT16")  # ONNX Runtime does not compare it
        for name, bound in (("Less", min), ("Greater", max)):
            if bound is not None:
                pair = [op.Cast(value, to=1) if half else value for value in (result, bound)]
                result = op.Where(getattr(op, name)(*pair), bound, result)
        for bound in (min, max):
            if bound is not None and bound.dtype is not None:  # own constants have no dtype and are no NaN
                result = op.Where(op.IsNaN(wide(bound)[0]), bound, result)
        return result
    for name, bound in (("Max", min), ("Min", max)):
        if bound is not None:
            result = getattr(op, name)(result, bound)
    return result


def clamp_by_numbers(self: Any, min: Any = None, max: Any = None) -> Any:
    """Write a clamp between two numbers by ``clamp``.

    Clip with one bound would make infinity the largest finite number.
    """
    if not all(bound is None or isinstance(bound, (int, float)) for bound in (min, max)):
        raise Untranslated("a bound is known only at run time")
    if not _is_float(self) and any(isinstance(bound, float) for bound in (min, max)):
        raise Untranslated("it clamps integers between floats")
    if any(isinstance(bound, float) and math.isnan(bound) for bound in (min, max)):
        raise Untranslated("a bound is NaN")

    def constant(bound: Any) -> Any:
        if bound is None:
            return None
        return number(bound, self)

    return clamp(self, constant(min), constant(max))


def _is_float(x: Any) -> bool:
    return is_type(x, "FLOAT", "FLOAT16")


def _nan_along(x: Any, axes: Sequence[int], keepdim: bool) -> Any:
    nans = op.Cast(op.IsNaN(wide(x)[0]), to=6)
    reduced = op.ReduceMax(nans, op.Constant(value_ints=list(axes)), keepdims=int(keepdim))
    return op.Cast(reduced, to=9)


def _with_nan(extreme: Any, x: Any, dim: Sequence[int], keepdim: bool) -> Any:
    if rank(x) == 0 or not _is_float(x):
        return extreme
    nan = op.CastLike(op.Constant(value_float=float("nan")), x)
    return op.Where(_nan_along(x, list(dim) or list(range(rank(x))), keepdim), nan, extreme)


def _place(name: str, self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Write the index of the maximum or minimum along ``dim``; None means in the flattened tensor.

    name: the ONNX op, ArgMax or ArgMin.
    """
    x = self
    if rank(x) == 0:
        return op.Constant(value_int=0)
    values = op.Cast(x, to=6) if is_type(x, "BOOL") else wide(x)[0]
    if dim is None:
        values = op.Reshape(values, op.Constant(value_ints=[-1]))
    axis, keep = (0, False) if dim is None else (dim, keepdim)
    place = getattr(op, name)(values, axis=axis, keepdims=int(keep))
    if _is_float(x):
        none = op.Cast(op.IsNaN(values), to=6)
        there = op.Cast(op.ReduceMax(none, op.Constant(value_ints=[axis]), keepdims=int(keep)), to=9)
        place = op.Where(there, op.ArgMax(none, axis=axis, keepdims=int(keep)), place)
    if dim is None and keepdim:
        place = op.Reshape(place, op.Constant(value_ints=[1] * rank(x)))
    return place


TABLE: dict[Any, Any] = {
    _aten.amax.default: amax,
    _aten.amin.default: amin,
    _aten.max.default: amax,
    _aten.min.default: amin,
    _aten.aminmax.default: aminmax,
    _aten.max.dim: _of_dim(amax, "ArgMax"),
    _aten.min.dim: _of_dim(amin, "ArgMin"),
    _aten.argmax.default: partial(_place, "ArgMax"),
    _aten.argmin.default: partial(_place, "ArgMin"),
    _aten.topk.default: topk,
    _aten.clamp.Tensor: clamp,
    _aten.clamp.default: clamp_by_numbers,
    _aten.clamp_min.default: clamp_by_numbers,
    _aten.clamp_max.default: lambda self, max: clamp_by_numbers(self, None, max),
}
