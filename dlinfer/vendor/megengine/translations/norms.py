"""Translations of reductions and norms."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value
from dlinfer.vendor.megengine.translations.table import Translation, aten, ours, translation


def reduce(writer: NodeList, kind: str, value: Value, dims: Sequence[int], keepdim: bool) -> Value:
    """Reduce the dimensions ``dims`` of a value. kind: "sum", "mean", "max" or "min"."""
    axes = sorted({dim % len(value.shape) for dim in dims})
    shape = [1 if axis in axes else size for axis, size in enumerate(value.shape)]
    if not keepdim:
        shape = [size for axis, size in enumerate(value.shape) if axis not in axes]
    if not shape:
        raise UntranslatableError("the result has no dimensions, which MegEngine Lite does not support")
    return writer.op("reduce", value, like=shape, how=kind, axes=axes, keepdims=keepdim)


def _reduction(kind: str) -> Translation:
    def write(
        writer: NodeList, result: Tensor, self: Value, dim: Any, keepdim: bool, dtype: Any = None
    ) -> Value:
        if dtype not in (None, torch.float32):
            raise UntranslatableError("the reduction returns another dtype")
        return reduce(writer, kind, self, dim or range(len(self.shape)), keepdim)

    return write


for _kind, _op in {
    "mean": aten.mean.dim,
    "sum": aten.sum.dim_IntList,
    "max": aten.amax.default,
    "min": aten.amin.default,
}.items():
    translation(_op)(_reduction(_kind))


@translation(aten.layer_norm.default)
def _layer_norm(
    writer: NodeList,
    result: Tensor,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Value:
    dims = range(-len(normalized_shape), 0)
    centred = writer.op("sub", input, reduce(writer, "mean", input, dims, True), like=result)
    normed = _over_root(writer, centred, dims, eps)
    if weight is not None:
        normed = writer.op("mul", normed, weight, like=result)
    return normed if bias is None else writer.op("add", normed, bias, like=result)


def _over_root(writer: NodeList, value: Value, dims: Sequence[int], eps: float) -> Value:
    square = writer.op("mul", value, value, like=value)
    mean = reduce(writer, "mean", square, dims, True)
    root = writer.op("sqrt", writer.op("add", mean, eps, like=mean), like=mean)
    return writer.op("div", value, root, like=value)


@translation(ours.rms_norm.default)
def _rms_norm(writer: NodeList, result: Tensor, x: Value, weight: Value, eps: float) -> Value:
    return writer.op("mul", _over_root(writer, x, (-1,), eps), weight, like=result)


@translation(ours.add_rms_norm.default)
def _add_rms_norm(
    writer: NodeList, result: Sequence[Tensor], x: Value, residual: Value, weight: Value, eps: float
) -> list[Value]:
    total = writer.op("add", x, residual, like=x)
    return [_rms_norm(writer, result[0], total, weight, eps), total]
