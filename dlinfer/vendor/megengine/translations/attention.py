"""Translation of attention into scores, a mask, a softmax, and the product with the values."""

import math

import torch
from torch import Tensor

from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value
from dlinfer.vendor.megengine.translations.norms import reduce
from dlinfer.vendor.megengine.translations.products import product
from dlinfer.vendor.megengine.translations.table import (
    aten,
    broadcast,
    float32,
    full,
    reshaped,
    translation,
    truth,
)


@translation(aten.scaled_dot_product_attention.default, mixed=True)
def _attention(
    writer: NodeList,
    result: Tensor,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    float32(query, key, value)
    if dropout_p or len(query.shape) < 3:
        raise UntranslatableError("the attention has dropout, or its inputs are matrices")
    if is_causal and attn_mask is not None:
        raise UntranslatableError("the attention has a mask and is_causal=True")
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = (_repeated(writer, heads, query.shape[-3]) for heads in (key, value))
    batch, long, wide = query.shape[:-2], query.shape[-2], key.shape[-2]
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    scaled = writer.op("mul", query, factor, like=query)
    scores = product(writer, scaled, key, (*batch, long, wide), transpose=True)
    condition, seen = attn_mask, True
    if is_causal:
        condition = writer.op("later", like=(long, wide), dtype=torch.bool, rows=long, columns=wide)
        seen = False
    elif attn_mask is not None and attn_mask.dtype != torch.bool:
        float32(attn_mask)
        # For a row of minus infinities torch returns zeros, softmax NaN.
        lowest = float(torch.finfo(torch.float32).min)
        added = writer.op("maximum", attn_mask, lowest, like=attn_mask)
        condition = writer.op("less", attn_mask, lowest, like=attn_mask, dtype=torch.bool)
        seen = False
        scores = writer.op("add", scores, added, like=scores)
    return product(writer, _weights(writer, scores, condition, seen), value, tuple(result.shape))


def _weights(writer: NodeList, scores: Value, condition: Value | None, seen: bool) -> Value:
    """Return the softmax of the visible scores over the last dimension. A row without visible scores gives zeros.

    condition: a bool tensor that is True where a score is visible; if ``seen`` is False, where a score is hidden. None
        means that all scores are visible."""
    if condition is None:
        return writer.op("softmax", scores, like=scores, axis=len(scores.shape) - 1)
    zeros, low = full(writer, scores, 0.0), full(writer, scores, -1e30)
    picks = broadcast(writer, truth(writer, condition), scores.shape)

    def choose(visible: Value, hidden: Value) -> Value:
        pair = (visible, hidden) if seen else (hidden, visible)
        return writer.op("where", picks, *pair, like=scores, dtype=torch.float32)

    visible = choose(scores, low)
    shifted = writer.op("sub", visible, reduce(writer, "max", visible, (-1,), True), like=scores)
    powers = choose(writer.op("exp", shifted, like=scores), zeros)
    total = reduce(writer, "sum", powers, (-1,), True)
    return writer.op("div", powers, writer.op("maximum", total, 1e-30, like=total), like=scores)


def _repeated(writer: NodeList, heads: Value, count: int) -> Value:
    """Repeat each head of ``heads`` until there are ``count`` heads. The copies of a head lie side by side."""
    *batch, few, length, size = heads.shape
    apart = reshaped(writer, heads, (*batch, few, 1, length, size))
    many = broadcast(writer, apart, (*batch, few, count // few, length, size))
    return reshaped(writer, many, (*batch, count, length, size))
