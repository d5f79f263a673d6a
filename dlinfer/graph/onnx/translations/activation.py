"""Translate gated activations."""

import math

import torch

from dlinfer.graph.onnx.translations.writing import Value, number, op, translates

_ops = torch.ops.dlinfer


@translates(_ops.silu_mul.default)
def silu_mul(gate: Value, up: Value) -> Value:
    return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)


@translates(_ops.silu_and_mul.default)
def silu_and_mul(x: Value) -> Value:
    """Return ``silu_mul`` of the two halves of the last dimension. The first half is the gate."""
    gate, up = op.Split(x, axis=-1, num_outputs=2)
    return silu_mul(gate, up)


@translates(_ops.gelu_mul.default)
def gelu_mul(gate: Value, up: Value, tanh: bool) -> Value:
    return op.Mul(gelu(gate, tanh), up)


def gelu(x: Value, tanh: bool) -> Value:
    """Return ``x * P(X <= x)`` for a standard normal X. tanh: use torch's approximation by tanh."""
    if tanh:
        cubic = op.Mul(number(0.044715, x), op.Mul(x, op.Mul(x, x)))
        inner = op.Tanh(op.Mul(number(math.sqrt(2 / math.pi), x), op.Add(x, cubic)))
    else:
        inner = op.Erf(op.Mul(x, number(math.sqrt(0.5), x)))
    return op.Mul(op.Mul(number(0.5, x), x), op.Add(inner, number(1.0, x)))
