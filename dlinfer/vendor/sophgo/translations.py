"""Translations to ONNX in the forms that Sophgo's compiler makes one op of, and without what it lacks."""

import functools
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
    opset,
    rank,
    shape_of,
    sizes,
)

_aten = torch.ops.aten
_ops = torch.ops.dlinfer


def table() -> Mapping[Any, Any]:
    """Translations by op, taken before the standard ones."""
    return {
        _ops.rms_norm.default: rms_norm,
        _ops.add_rms_norm.default: add_rms_norm,
        _aten.rms_norm.default: aten_rms_norm,
        _aten.scaled_dot_product_attention.default: _attention,
    }


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Pow, ReduceMean, Add, Sqrt, Reciprocal, Mul, Mul: the one form that becomes the compiler's own RMSNorm, which
    adds up in float32 (its source: lib/Dialect/Top/Transforms of tpu-mlir)."""
    op = opset()
    mean = op.ReduceMean(op.Pow(x, number(2.0, x)), [-1], keepdims=1)
    root = op.Sqrt(op.Add(mean, number(eps, x)))
    return op.Mul(op.Mul(x, op.Reciprocal(root)), weight)


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """The sum, and its norm."""
    total = opset().Add(x, residual)
    total.dtype = x.dtype
    return rms_norm(total, weight, eps), total


def aten_rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    """torch's own op over the last dimension."""
    if len(normalized_shape) != 1 or weight is None:
        raise Untranslated("rms_norm over more than the last dimension, or without a weight")
    return rms_norm(input, weight, torch.finfo(torch.float32).eps if eps is None else eps)


def finite_table() -> Mapping[Any, Any]:
    """``table`` for graphs whose masks are of finite numbers, and leave each query a key to see.

    Then attention is a softmax of a sum, which the compiler makes one op of.
    """
    return {
        **table(),
        _aten.scaled_dot_product_attention.default: functools.partial(_attention, finite=True),
    }


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
        raise Untranslated("a mask that is not of floats")
    if not finite or dropout_p or is_causal or attn_mask is None:
        written = attention.attention_with(attention.plain_scores)
        return written(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    op = opset()
    dims = rank(query)
    if enable_gqa:
        group = fixed(query, -3, "the number of heads") // fixed(key, -3, "the number of KV heads")
        key, value = _repeated(key, group), _repeated(value, group)
    factor = 1.0 / math.sqrt(fixed(query, dims - 1, "the head size")) if scale is None else scale
    order = [*range(dims - 2), dims - 1, dims - 2]
    scores = op.Mul(op.MatMul(query, op.Transpose(key, perm=order)), number(factor, query))
    return op.MatMul(op.Softmax(op.Add(scores, attn_mask), axis=-1), value)


def _repeated(x: Any, group: int) -> Any:
    """Each KV head once for each query head of its group: [..., KH, S, D] -> [..., KH * group, S, D]."""
    if group == 1:
        return x
    op = opset()
    lead = sizes(x, 0, -3)
    rest = sizes(x, -2)
    heads = fixed(x, -3, "the number of KV heads")
    wide = op.Expand(op.Unsqueeze(x, [rank(x) - 2]), shape_of([*lead, heads, group, *rest]))
    return op.Reshape(wide, shape_of([*lead, heads * group, *rest]))
