"""RMS normalisation."""

import torch

from dlinfer.graph.onnx.translations.writing import Value, number, op, translates, wide

_ops = torch.ops.dlinfer


@translates(_ops.rms_norm.default)
def rms_norm(x: Value, weight: Value, eps: float) -> Value:
    """Return the RMS norm of x. Compute the mean in float32, and round before the weight, as dlinfer's op does."""
    values, cast = wide(x)
    mean = op.ReduceMean(op.Mul(values, values), [-1], keepdims=1)
    root = op.Sqrt(op.Add(mean, number(eps, x, wide=True)))
    scaled = op.Div(values, root)
    return op.Mul(op.Cast(scaled, to=int(x.dtype)) if cast else scaled, weight)


@translates(_ops.add_rms_norm.default)
def add_rms_norm(x: Value, residual: Value, weight: Value, eps: float) -> tuple[Value, Value]:
    """Return (the RMS norm of ``x + residual``, the sum)."""
    total = op.Add(x, residual)
    total.dtype = x.dtype
    return rms_norm(total, weight, eps), total
