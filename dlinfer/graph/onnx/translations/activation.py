"""Gated activations."""

import math

import torch

from dlinfer.graph.onnx.translations.writing import Table, Value, number, opset

_ops = torch.ops.dlinfer


def table() -> Table:
    """Translations by op."""
    return {
        _ops.silu_mul.default: silu_mul,
        _ops.silu_and_mul.default: silu_and_mul,
        _ops.gelu_mul.default: gelu_mul,
    }


def silu_mul(gate: Value, up: Value) -> Value:
    """gate * sigmoid(gate) * up."""
    op = opset()
    return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)


def silu_and_mul(x: Value) -> Value:
    """``silu_mul`` of the two halves of the last dimension."""
    gate, up = opset().Split(x, axis=-1, num_outputs=2)
    return silu_mul(gate, up)


def gelu_mul(gate: Value, up: Value, tanh: bool) -> Value:
    """gelu(gate) * up."""
    return opset().Mul(gelu(gate, tanh), up)


def gelu(x: Value, tanh: bool) -> Value:
    """x * P(X <= x) for a standard normal X, or its approximation by tanh."""
    op = opset()
    if tanh:
        cubic = op.Mul(number(0.044715, x), op.Mul(x, op.Mul(x, x)))
        inner = op.Tanh(op.Mul(number(math.sqrt(2 / math.pi), x), op.Add(x, cubic)))
    else:
        inner = op.Erf(op.Mul(x, number(math.sqrt(0.5), x)))
    return op.Mul(op.Mul(number(0.5, x), x), op.Add(inner, number(1.0, x)))
