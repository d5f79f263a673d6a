"""Translations of torch's ops to ONNX for Sophgo's compiler.

Some write patterns that the compiler fuses to one op. Others replace ONNX ops that the compiler lacks."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dlinfer.graph.onnx.translations import attention
from dlinfer.graph.onnx.translations.writing import (
    Untranslated,
    fixed,
    is_type,
    number,
    op,
    rank,
    shape_of,
    sizes,
)

_aten = torch.ops.aten
_ops = torch.ops.dlinfer


def table() -> Mapping[Any, Any]:
    """Return a dict from ops to translations, for ops whose standard translation the compiler takes badly."""
    return {
        _ops.rms_norm.default: rms_norm,
        _ops.add_rms_norm.default: add_rms_norm,
        _aten.rms_norm.default: aten_rms_norm,
        _aten.scaled_dot_product_attention.default: _attention,
        _aten.erf.default: erf,
        _aten.clamp.default: clamp,
        _aten.split.Tensor: split,
        _aten.split_with_sizes.default: split_with_sizes,
        _aten.chunk.default: chunk,
        _aten.unbind.int: unbind,
        _aten.conv2d.default: conv2d,
    }


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Write the norm as Pow, ReduceMean, Add, Sqrt, Reciprocal, Mul, Mul.

    Sophgo's compiler turns only this pattern into its own op RMSNorm, which sums in float32 (tpu-mlir:
    lib/Dialect/Top/Transforms)."""
    mean = op.ReduceMean(op.Pow(x, number(2.0, x)), [-1], keepdims=1)
    root = op.Sqrt(op.Add(mean, number(eps, x)))
    return op.Mul(op.Mul(x, op.Reciprocal(root)), weight)


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """Write x + residual and its norm. Return the norm, then the sum."""
    total = op.Add(x, residual)
    total.dtype = x.dtype
    return rms_norm(total, weight, eps), total


def aten_rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    """Write ``aten.rms_norm`` over the last dimension. Raises Untranslated for more dimensions or without a weight."""
    if len(normalized_shape) != 1 or weight is None:
        raise Untranslated("rms_norm normalises more than the last dimension, or has no weight")
    return rms_norm(input, weight, torch.finfo(torch.float32).eps if eps is None else eps)


def finite_table() -> Mapping[Any, Any]:
    """Return ``table`` for graphs whose attention masks are finite and let each query see at least one key.

    Such attention is softmax(scores + mask) @ values, which the compiler fuses to one op."""
    attending = functools.partial(_attention, finite=True)
    return {**table(), _aten.scaled_dot_product_attention.default: attending}


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    finite: bool = False,
) -> Any:
    if attn_mask is not None and not is_type(attn_mask, "FLOAT", "FLOAT16", "BFLOAT16"):
        raise Untranslated("the mask is not floating-point")
    if not finite or dropout_p or is_causal or attn_mask is None:
        written = attention.attention_with(attention.plain_scores)
        return written(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    dims = rank(query)
    if enable_gqa:
        group = fixed(query, -3, "the number of heads") // fixed(key, -3, "the number of KV heads")
        key, value = _repeated(key, group), _repeated(value, group)
    factor = 1.0 / math.sqrt(fixed(query, dims - 1, "the head size")) if scale is None else scale
    order = [*range(dims - 2), dims - 1, dims - 2]
    scores = op.Mul(op.MatMul(query, op.Transpose(key, perm=order)), number(factor, query))
    return op.MatMul(op.Softmax(op.Add(scores, attn_mask), axis=-1), value)


def _repeated(x: Any, group: int) -> Any:
    """Repeat each KV head for all query heads that use it: [..., KH, S, D] -> [..., KH * group, S, D]."""
    if group == 1:
        return x
    lead, rest = sizes(x, 0, -3), sizes(x, -2)
    heads = fixed(x, -3, "the number of KV heads")
    wide = op.Expand(op.Unsqueeze(x, [rank(x) - 2]), shape_of([*lead, heads, group, *rest]))
    return op.Reshape(wide, shape_of([*lead, heads * group, *rest]))


# --- ops that torch.onnx writes as sequences or with casts, which the compiler lacks


def erf(self: Any) -> Any:
    return op.Erf(self)


def clamp(self: Any, min: float | None = None, max: float | None = None) -> Any:
    """Write a clamp. A bound that is None does not limit."""
    at_least = self if min is None else op.Max(self, number(min, self))
    return at_least if max is None else op.Min(at_least, number(max, self))


def split(self: Any, split_size: int, dim: int = 0) -> list[Any]:
    """Write a split into parts of ``split_size``. The last part may be smaller."""
    whole = fixed(self, dim, "the size that is split")
    return _parts(self, [*range(0, whole, split_size), whole], dim)


def split_with_sizes(self: Any, split_sizes: Sequence[int], dim: int = 0) -> list[Any]:
    if not all(isinstance(size, int) for size in split_sizes):
        raise Untranslated("the parts have symbolic sizes")
    return _parts(self, [0, *itertools.accumulate(split_sizes)], dim)


def chunk(self: Any, chunks: int, dim: int = 0) -> list[Any]:
    """Write a split into at most ``chunks`` parts of equal size. The last part may be smaller."""
    return split(self, -(-fixed(self, dim, "the size that is split") // chunks), dim)


def unbind(self: Any, dim: int = 0) -> list[Any]:
    """Write a split into slices of size 1, without the dimension ``dim``."""
    whole = fixed(self, dim, "the size that is split")
    return [op.Squeeze(part, [dim]) for part in _parts(self, [*range(whole + 1)], dim)]


def _parts(value: Any, borders: Sequence[int], dim: int) -> list[Any]:
    pairs = itertools.pairwise(borders)
    parts = [op.Slice(value, [start], [end], [dim % rank(value)]) for start, end in pairs]
    for part in parts:
        part.dtype = value.dtype
    return parts


def conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Any:
    if rank(input) != 4:
        raise Untranslated("the input of conv2d has no batch dimension")
    operands = (input, weight) if bias is None else (input, weight, bias)
    strides, pads, dilations = map(_pair, (stride, padding, dilation))
    return op.Conv(*operands, strides=strides, pads=pads * 2, dilations=dilations, group=groups)


def _pair(value: Any) -> list[int]:
    """Return two numbers: those of a list, or one number twice."""
    numbers = [int(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
    return numbers * 2 if len(numbers) == 1 else numbers
