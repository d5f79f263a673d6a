"""Translate scaled dot-product attention into matrix products and a softmax."""

import functools
import math
from collections.abc import Callable

import torch

from dlinfer.graph.onnx.translations.writing import (
    Untranslated,
    Value,
    equal_sizes,
    fixed,
    is_type,
    lowest,
    number,
    op,
    rank,
    shape_of,
    size,
    sizes,
    translates,
)

Scores = Callable[[Value, Value, float, int], Value]
"""A function from queries [..., L, E], keys [..., S, E], scale and rank to ``scale * queries @ keys.T``."""


def plain_scores(query: Value, key: Value, scale: float, dims: int) -> Value:
    """Return the scaled products of queries and keys, as Transpose and MatMul. dims: the rank of both operands."""
    order = [*range(dims - 2), dims - 1, dims - 2]
    scaled = op.Mul(query, number(scale, query))
    return op.MatMul(scaled, op.Transpose(key, perm=order))


def attention_with(scores: Scores) -> Callable[..., Value]:
    """Return a translation of torch's op. scores: a function that writes the products of queries and keys."""
    return functools.partial(_attention, scores)


def _attention(
    scores: Scores,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """Return the attention as torch defines it: the result of a query without a visible key is 0.

    If several query heads share a KV head, their rows become rows of one matrix product.
    """
    if dropout_p:
        raise Untranslated("the attention has dropout")
    if is_causal and attn_mask is not None:
        raise Untranslated("the attention has a mask and is_causal=True")
    dims = rank(query)
    factor = 1.0 / math.sqrt(fixed(query, dims - 1, "the head size")) if scale is None else scale
    mask = _causal(query, key) if is_causal else attn_mask
    grouped = enable_gqa and not equal_sizes([query.shape[-3]], [key.shape[-3]])
    group = _group(query, key) if grouped else 1
    rows, shown = query, None
    if grouped:
        heads = (key, dims - 3)
        head_size = (query, dims - 1)
        shown = shape_of([*sizes(query, 0, -3), heads, group, (query, dims - 2), (key, dims - 2)])
        # [..., heads, group, L, E] -> [..., heads, group * L, E]: the rows of a group lie side by side.
        rows = op.Reshape(query, _merged(query, key, group, head_size))
    weights = scores(rows, key, factor, dims)
    weights = weights if shown is None else op.Reshape(weights, shown)
    weights = _softmax(weights, _grouped_mask(mask, query, key, group) if grouped else mask, query)
    if shown is not None:
        weights = op.Reshape(weights, _merged(query, key, group, (key, dims - 2)))
    result = op.MatMul(weights, value)
    if grouped:
        result = op.Reshape(result, shape_of([*sizes(query, 0, -1), (value, dims - 1)]))
    return result


def _group(query: Value, key: Value) -> int:
    heads, shared = fixed(query, -3, "the number of heads"), fixed(key, -3, "the number of KV heads")
    if heads % shared:
        raise Untranslated(f"{heads} query heads are not a multiple of {shared} KV heads")
    return heads // shared


def _merged(query: Value, key: Value, group: int, last: tuple[Value, int]) -> Value:
    """Return the shape [..., KV heads, group * L, last]. With it, the query heads of each KV head form one matrix.

    group: the number of query heads of each KV head. last: (tensor, dimension) with the size of the last dimension.
    """
    dims = rank(query)
    length = size(query, dims - 2)
    head = [*sizes(query, 0, -3), (key, dims - 3)]
    if length is not None:
        return shape_of([*head, group * length, last])
    rows = op.Mul(op.Shape(query, start=dims - 2, end=dims - 1), op.Constant(value_ints=[group]))
    return op.Concat(shape_of(head), rows, shape_of([last]), axis=0)


def _grouped_mask(mask: Value, query: Value, key: Value, group: int) -> Value:
    """Reshape a mask [..., heads or 1, L, S] to fit scores of the shape [..., kv heads, group, L, S]."""
    if mask is None or mask.shape is None or rank(mask) < 3:
        return mask
    if size(mask, -3) == 1:
        grouped = op.Unsqueeze(mask, [-3])
    else:
        parts = [*sizes(mask, 0, -3), (key, rank(key) - 3), group, *sizes(mask, -2)]
        grouped = op.Reshape(mask, shape_of(parts))
    grouped.dtype = mask.dtype
    return grouped


def _causal(query: Value, key: Value) -> Value:
    """Return the causal mask: True if the key's position is not after the query's, both counted from the start."""
    from onnx_ir import DataType

    dims = rank(query)
    ones = op.Expand(op.Constant(value_float=1.0), shape_of([(query, dims - 2), (key, dims - 2)]))
    seen = op.Cast(op.Trilu(ones, upper=0), to=9)
    seen.dtype = DataType.BOOL
    return seen


def _softmax(scores: Value, mask: Value, query: Value) -> Value:
    """Return the softmax of scores over the last dimension. Rows without a visible key become zeros."""
    if mask is None:
        return op.Softmax(scores, axis=-1)
    low, zero = number(lowest(query), query), number(0.0, query)
    if is_type(mask, "BOOL"):
        return op.Where(mask, op.Softmax(op.Where(mask, scores, low), axis=-1), zero)
    total = op.Add(scores, mask)
    hidden = op.Equal(total, number(-math.inf, query))
    return op.Where(hidden, zero, op.Softmax(op.Max(total, low), axis=-1))


translates(torch.ops.aten.scaled_dot_product_attention.default)(attention_with(plain_scores))
