"""Sigmoid and the activations that use it, written with Exp.

ONNX Runtime's own Sigmoid and QuickGelu return 0 for numbers below -18.
"""

from typing import Any

from dlinfer.graph.onnx.translations.writing import number, op, wide


def sigmoid(self: Any) -> Any:
    """Write 1 / (1 + exp(-x)) in float32 or wider, because exp(12) is infinite in float16."""
    x, cast = wide(self)
    result = op.Reciprocal(_one_and_exp(x, self))
    return op.CastLike(result, self) if cast else result


def silu(self: Any) -> Any:
    """Write x / (1 + exp(-x)), in float32 or wider."""
    x, cast = wide(self)
    result = op.Div(x, _one_and_exp(x, self))
    return op.CastLike(result, self) if cast else result


def silu_mul(gate: Any, up: Any) -> Any:
    return op.Mul(silu(gate), up)


def silu_and_mul(x: Any) -> Any:
    """Write silu of the first half of the last dimension, times the second half."""
    gate, up = op.Split(x, axis=-1, num_outputs=2)
    gate.dtype = x.dtype
    return silu_mul(gate, up)


def glu(self: Any, dim: int = -1) -> Any:
    """Write the first half of the dimension ``dim`` times the sigmoid of the second half."""
    values, gate = op.Split(self, axis=dim, num_outputs=2)
    gate.dtype = self.dtype
    return op.Mul(values, sigmoid(gate))


def _one_and_exp(x: Any, like: Any) -> Any:
    return op.Add(op.Exp(op.Neg(x)), number(1.0, like, wide=True))
