"""Translate mixture of experts: routing, and all experts at once.

ONNX has no op that runs only the chosen experts. The standard form computes every expert for every token, and adds the
results of the chosen experts. This is right, but as much work as a dense layer with all experts' weights.
"""

from collections.abc import Callable
from functools import partial

import torch

from dlinfer.graph.onnx.translations.activation import silu_mul
from dlinfer.graph.onnx.translations.writing import (
    Value,
    fixed,
    is_type,
    number,
    op,
    rank,
    shape_of,
    sizes,
    translates,
    wide,
)

_ops = torch.ops.dlinfer


@translates(_ops.moe_gating_topk_softmax.default)
def gating(router_logits: Value, topk: int, n_groups: int) -> tuple[Value, Value]:
    """Return the softmax weights and ids of each token's ``topk`` experts.

    With groups, these are the best ``topk / n_groups`` experts of each group.
    """
    logits, _ = wide(router_logits)
    weights = op.Softmax(logits, axis=-1)
    if n_groups < 1:
        return op.TopK(weights, op.Constant(value_ints=[topk]), axis=-1)
    leading = sizes(router_logits, 0, -1)
    group = fixed(router_logits, rank(router_logits) - 1, "the number of experts") // n_groups
    grouped = op.Reshape(weights, shape_of([*leading, n_groups, group]))
    chosen, ids = op.TopK(grouped, op.Constant(value_ints=[topk // n_groups]), axis=-1)
    first = op.Reshape(op.Constant(value_ints=[group * index for index in range(n_groups)]), [n_groups, 1])
    flat = shape_of([*leading, topk])
    return op.Reshape(chosen, flat), op.Reshape(op.Add(ids, first), flat)


def fused_moe_with(activation: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    """Return a translation of ``fused_moe``. activation: a function that writes ``silu(gate) * up``."""
    return partial(_fused_moe, activation)


def _fused_moe(
    activation: Callable[[Value, Value], Value],
    hidden_states: Value,
    gate_up_weights: Value,
    down_weights: Value,
    topk_weights: Value,
    topk_ids: Value,
    topk: int,
    renormalize: bool,
) -> Value:
    """Return the weighted sum of the results of each token's chosen experts.

    All experts are computed. The result of an expert that a token did not choose may be infinite, and is replaced by 0.
    """
    from onnx_ir import DataType

    x, cast = wide(hidden_states)
    gate_up, down = wide(gate_up_weights)[0], wide(down_weights)[0]
    weights, chosen = _dense_weights(hidden_states, gate_up_weights, topk_weights, topk_ids, renormalize)
    inner = op.MatMul(op.Unsqueeze(x, [0]), op.Transpose(gate_up, perm=[0, 2, 1]))
    gate, up = op.Split(inner, axis=-1, num_outputs=2)
    gate.dtype = DataType.FLOAT if cast else x.dtype
    each = op.MatMul(activation(gate, up), op.Transpose(down, perm=[0, 2, 1]))
    zero = number(0.0, hidden_states, wide=True)
    chosen_only = op.Where(_by_expert(chosen), op.Mul(each, _by_expert(weights)), zero)
    total = op.ReduceSum(chosen_only, [0], keepdims=0)
    return op.Cast(total, to=int(hidden_states.dtype)) if cast else total


def _dense_weights(
    x: Value, gate_up: Value, topk_weights: Value, topk_ids: Value, renormalize: bool
) -> tuple[Value, Value]:
    """Return two values [tokens, experts]: the experts' weights for each token, and whether the token chose each."""
    weights, ids = token_weights(x, topk_weights, renormalize), op.Cast(topk_ids, to=7)
    zero = number(0.0, x, wide=True)
    nothing = op.Expand(zero, shape_of([(topk_ids, 0), (gate_up, 0)]))
    ones = op.Expand(number(1.0, x, wide=True), op.Shape(ids))
    chosen = op.ScatterElements(nothing, ids, ones, axis=1)
    return op.ScatterElements(nothing, ids, weights, axis=1, reduction="add"), op.Greater(chosen, zero)


def _by_expert(x: Value) -> Value:
    return op.Unsqueeze(op.Transpose(x, perm=[1, 0]), [-1])


def token_weights(x: Value, topk_weights: Value, renormalize: bool) -> Value:
    """Return the weights [tokens, topk] of each token's chosen experts, in the dtype that the layer computes in."""
    weights = op.Cast(topk_weights, to=11 if is_type(x, "DOUBLE") else 1)
    if renormalize:
        weights = op.Div(weights, op.ReduceSum(weights, [-1], keepdims=1))
    return weights


translates(_ops.fused_moe.default)(fused_moe_with(silu_mul))
