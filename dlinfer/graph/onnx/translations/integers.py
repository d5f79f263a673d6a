"""Ops of whole numbers and bools that ONNX, or its runtimes, have for floating ones only."""

from collections.abc import Sequence
from typing import Any

import torch

from dlinfer.graph.onnx.translations.writing import Untranslated, is_type, opset, rank

_aten = torch.ops.aten
_INTEGERS = ("INT64", "INT32", "INT16", "INT8", "UINT8", "BOOL")


def table() -> dict[Any, Any]:
    """Translations by op."""
    return {
        _aten.ceil.default: ceil,
        _aten.floor.default: floor,
        _aten.round.default: round_,
        _aten.trunc.default: trunc,
        _aten.where.self: where,
        _aten.isnan.default: isnan,
        _aten.isfinite.default: isfinite,
        _aten.isinf.default: isinf,
        _aten.logsumexp.default: logsumexp,
    }


def ceil(self: Any) -> Any:
    """Whole numbers stay what they are."""
    return opset().Identity(self) if is_type(self, *_INTEGERS) else opset().Ceil(self)


def floor(self: Any) -> Any:
    """Whole numbers stay what they are."""
    return opset().Identity(self) if is_type(self, *_INTEGERS) else opset().Floor(self)


def round_(self: Any) -> Any:
    """Whole numbers stay what they are; halves go to the even neighbour."""
    return opset().Identity(self) if is_type(self, *_INTEGERS) else opset().Round(self)


def trunc(self: Any) -> Any:
    """Towards zero."""
    op = opset()
    if is_type(self, *_INTEGERS):
        return op.Identity(self)
    if not is_type(self, "FLOAT", "DOUBLE", "FLOAT16"):
        raise Untranslated(f"trunc of {self.dtype}")
    return op.Mul(op.Sign(self), op.Floor(op.Abs(self)))


def where(condition: Any, self: Any, other: Any) -> Any:
    """Of bools by logic: runtimes have no kernel for them."""
    op = opset()
    if not is_type(self, "BOOL"):
        return op.Where(condition, self, other)
    return op.Or(op.And(condition, self), op.And(op.Not(condition), other))


def isnan(self: Any) -> Any:
    """Never of a whole number."""
    op = opset()
    return _constant(self, False) if is_type(self, *_INTEGERS) else op.IsNaN(self)


def isinf(self: Any) -> Any:
    """Never of a whole number."""
    op = opset()
    return _constant(self, False) if is_type(self, *_INTEGERS) else op.IsInf(self)


def isfinite(self: Any) -> Any:
    """Always of a whole number."""
    op = opset()
    if is_type(self, *_INTEGERS):
        return _constant(self, True)
    return op.Not(op.Or(op.IsNaN(self), op.IsInf(self)))


def _constant(x: Any, value: bool) -> Any:
    op = opset()
    return op.Expand(op.Cast(op.Constant(value_int=int(value)), to=9), op.Shape(x))


def logsumexp(self: Any, dim: Sequence[int], keepdim: bool = False) -> Any:
    """Of whole numbers in float32."""
    op = opset()
    x = op.Cast(self, to=1) if is_type(self, *_INTEGERS) else self
    if rank(self) == 0:
        return op.Identity(x)
    axes = list(dim) or list(range(rank(self)))
    return op.ReduceLogSumExp(x, op.Constant(value_ints=axes), keepdims=int(keepdim))
