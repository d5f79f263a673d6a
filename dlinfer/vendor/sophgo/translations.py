"""Translations to ONNX in the forms that Sophgo's compiler makes one op of, and without what it lacks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dlinfer.graph.onnx.translations import attention
from dlinfer.graph.onnx.translations.writing import Untranslated, is_type, number, opset

_aten = torch.ops.aten
_ops = torch.ops.dlinfer


def table() -> Mapping[Any, Any]:
    """Translations by op, taken before the standard ones."""
    return {
        _ops.rms_norm.default: rms_norm,
        _ops.add_rms_norm.default: add_rms_norm,
        _aten.rms_norm.default: aten_rms_norm,
        _aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
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


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Scores plus a mask of floats. A mask of bools is refused: the compiler's ``Where`` computes with numbers."""
    if is_causal:
        raise Untranslated("causal attention without a mask of floats")
    if attn_mask is not None and not is_type(attn_mask, "FLOAT", "FLOAT16", "BFLOAT16"):
        raise Untranslated("a mask that is not of floats")
    return attention.attention_with(attention.plain_scores)(
        query, key, value, attn_mask, dropout_p, False, scale, enable_gqa
    )
