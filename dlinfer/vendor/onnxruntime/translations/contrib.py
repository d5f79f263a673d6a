"""Translations to ONNX Runtime's own ops, and the table of all translations of this engine.

Each of these ops replaces many standard nodes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dlinfer.graph.onnx.translations import attention, linear, moe, norm
from dlinfer.graph.onnx.translations.writing import is_type, number, op, rank, size
from dlinfer.vendor.onnxruntime.translations import contrib_ops, extremes, logistic, packed
from dlinfer.vendor.onnxruntime.translations.experts import experts

_ops = torch.ops.dlinfer

OPSET = 20
"""The opset of the models that this engine makes."""


def table() -> Mapping[Any, Any]:
    """Return a dict from ops to translations. These translations replace the standard ones."""
    return extremes.TABLE | {
        experts: experts,
        packed.product: packed.product,
        _ops.rms_norm.default: rms_norm,
        _ops.add_rms_norm.default: add_rms_norm,
        torch.ops.aten.sigmoid.default: logistic.sigmoid,
        torch.ops.aten.silu.default: logistic.silu,
        torch.ops.aten.glu.default: logistic.glu,
        torch.ops.aten.sign.default: sign,
        torch.ops.aten.sgn.default: sign,
        _ops.silu_mul.default: logistic.silu_mul,
        _ops.silu_and_mul.default: logistic.silu_and_mul,
        _ops.fused_moe.default: moe.fused_moe_with(logistic.silu_mul),
        torch.ops.aten.linear.default: linear_of,
        _ops.linear.default: linear_of,
        _ops.linears.default: linears,
        torch.ops.aten.scaled_dot_product_attention.default: attention.attention_with(scores),
    }


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Write SimplifiedLayerNormalization if ``x`` is float32, else standard ops.

    The float64 kernel of SimplifiedLayerNormalization computes the mean only in float32.
    """
    if not is_type(x, "FLOAT"):
        return norm.rms_norm(x, weight, eps)
    return contrib_ops.simplified_layer_norm(x, weight, eps)


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    if not is_type(x, "FLOAT") or rank(x) not in (2, 3):
        total = op.Add(x, residual)
        total.dtype = x.dtype
        return rms_norm(total, weight, eps), total
    return contrib_ops.skip_simplified_layer_norm(x, residual, weight, eps)


def sign(self: Any) -> Any:
    """Write the sign as -1, 0 or 1. The sign of NaN is 0."""
    zero, more, less = number(0, self), number(1, self), number(0 if is_type(self, "UINT8") else -1, self)
    return op.Where(op.Greater(self, zero), more, op.Where(op.Less(self, zero), less, zero))


def linear_of(input: Any = None, weight: Any = None, bias: Any = None, x: Any = None) -> Any:
    """Write FusedMatMul, which reads a weight as torch stores it and so needs no Transpose node.

    dlinfer's op calls the first argument ``x``; torch's op calls it ``input``.
    """
    values = x if input is None else input
    empty = any(size(values, dim) == 0 for dim in range(rank(values)))
    if empty or rank(values) == 2 or not is_type(values, "FLOAT", "DOUBLE"):
        return linear.linear(values, weight, bias)
    product = contrib_ops.fused_mat_mul(values, weight, trans_b=True)
    return product if bias is None else op.Add(product, bias)


def linears(x: Any, weights: Sequence[Any], biases: Sequence[Any]) -> list[Any]:
    return [linear_of(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def scores(query: Any, key: Any, scale: float, dims: int) -> Any:
    """Write attention scores, query @ key^T * scale, by FusedMatMul, which needs no Transpose node for the keys."""
    if not is_type(key, "FLOAT", "DOUBLE"):
        return attention.plain_scores(query, key, scale, dims)
    return contrib_ops.fused_mat_mul(query, key, trans_b=True, alpha=scale)
