"""Translate rotary position embedding."""

import torch

from dlinfer.graph.onnx.translations.writing import (
    Value,
    equal_sizes,
    fixed,
    op,
    rank,
    shape_of,
    sizes,
    translates,
)

_ops = torch.ops.dlinfer


@translates(_ops.apply_rotary_pos_emb.default)
def apply_rotary_pos_emb(q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """Return q and k after rotation: ``x * cos + (-b, a) * sin``, where a and b are the halves of x.

    cos and sin have a row for each token.
    """
    cos, sin = _per_token(cos, q), _per_token(sin, q)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _per_token(table: Value, q: Value) -> Value:
    if equal_sizes(list(table.shape)[:-1], list(q.shape)[:-2]):
        return op.Unsqueeze(table, [-2])
    return op.Reshape(table, shape_of([*sizes(q, 0, -2), 1, (q, rank(q) - 1)]))


def _rotated(x: Value, cos: Value, sin: Value) -> Value:
    first, second = op.Split(x, axis=-1, num_outputs=2)
    turned = op.Concat(op.Neg(second), first, axis=-1)
    return op.Add(op.Mul(x, cos), op.Mul(turned, sin))


@translates(_ops.apply_rotary_pos_emb_interleaved.default)
def apply_rotary_pos_emb_interleaved(
    native_input: Value, cos: Value, sin: Value, return_native_layout: bool
) -> Value:
    """Return the input with each adjacent pair (a, b) rotated to (a cos - b sin, b cos + a sin).

    return_native_layout: return all first elements of pairs, then all second elements. If False, pairs stay adjacent.
    """
    x = native_input
    last = rank(x) - 1
    half = fixed(x, last, "the head size") // 2
    cos, sin = (op.Slice(table, [0], [half], [-1]) for table in (cos, sin))
    first, second = (op.Slice(x, [start], [2 * half], [last], [2]) for start in (0, 1))
    turned = (
        op.Sub(op.Mul(first, cos), op.Mul(second, sin)),
        op.Add(op.Mul(second, cos), op.Mul(first, sin)),
    )
    if return_native_layout:
        return op.Concat(*turned, axis=-1)
    pairs = op.Concat(*(op.Unsqueeze(part, [-1]) for part in turned), axis=-1)
    return op.Reshape(pairs, shape_of(sizes(x)))
