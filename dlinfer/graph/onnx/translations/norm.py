"""Translate RMS normalisation."""

import torch

from dlinfer.graph.onnx.translations.writing import Value, number, op, translates, wide

_ops = torch.ops.dlinfer


@translates(_ops.rms_norm.default)
def rms_norm(x: Value, weight: Value, eps: float) -> Value:
    """Return the RMS norm of x.

    As in dlinfer's op, the mean is in float32, and the normalised x is rounded to its dtype before the product.
    """
    values, cast = wide(x)
    mean = op.ReduceMean(op.Mul(values, values), [-1], keepdims=1)
    root = op.Sqrt(op.Add(mean, number(eps, x, wide=True)))
    scaled = op.Div(values, root)
    return op.Mul(op.Cast(scaled, to=int(x.dtype)) if cast else scaled, weight)


@translates(_ops.add_rms_norm.default)
def add_rms_norm(x: Value, residual: Value, weight: Value, eps: float) -> tuple[Value, Value]:
    """Return two values: the RMS norm of ``x + residual``, and ``x + residual`` itself."""
    total = op.Add(x, residual)
    total.dtype = x.dtype
    return rms_norm(total, weight, eps), total
