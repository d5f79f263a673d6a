"""Attention, written out: scores, what is seen, weights, values."""

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
    translation,
    truth,
)


@translation(aten.scaled_dot_product_attention.default)
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
        raise UntranslatableError("attention with dropout, or of single matrices")
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = (_repeated(writer, one, query.shape[-3]) for one in (key, value))
    batch, long, wide = query.shape[:-2], query.shape[-2], key.shape[-2]
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    scores = product(
        writer, writer.op("mul", query, factor, like=query), key, (*batch, long, wide), transpose=True
    )
    if is_causal:
        later = writer.op("later", like=(long, wide), dtype=torch.bool, rows=long, columns=wide)
        return product(writer, _weights(writer, scores, None, later), value, tuple(result.shape))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        float32(attn_mask)
        # A row of minus infinities is none of softmax's; torch gives zeros for it.
        lowest = float(torch.finfo(torch.float32).min)
        added = writer.op("maximum", attn_mask, lowest, like=attn_mask)
        hidden = writer.op("less", attn_mask, lowest, like=attn_mask, dtype=torch.bool)
        total = writer.op("add", scores, added, like=scores)
        return product(writer, _weights(writer, total, None, hidden), value, tuple(result.shape))
    weights = _weights(writer, scores, attn_mask, None)
    return product(writer, weights, value, tuple(result.shape))


def _weights(writer: NodeList, scores: Value, seen: Value | None, hidden: Value | None) -> Value:
    """Softmax over the last dimension without what is hidden; zeros where all of a row is."""
    if seen is None and hidden is None:
        return writer.op("softmax", scores, like=scores, axis=len(scores.shape) - 1)
    zeros, low = full(writer, scores, 0.0), full(writer, scores, -1e30)
    if seen is not None:
        condition = broadcast(writer, truth(writer, seen), scores.shape)
        visible = writer.op("where", condition, scores, low, like=scores, dtype=torch.float32)
        shifted = writer.op("sub", visible, reduce(writer, "max", visible, (-1,), True), like=scores)
        powers = writer.op("exp", shifted, like=scores)
        powers = writer.op("where", condition, powers, zeros, like=scores, dtype=torch.float32)
    else:
        assert hidden is not None
        condition = broadcast(writer, hidden, scores.shape)
        visible = writer.op("where", condition, low, scores, like=scores, dtype=torch.float32)
        shifted = writer.op("sub", visible, reduce(writer, "max", visible, (-1,), True), like=scores)
        powers = writer.op("exp", shifted, like=scores)
        powers = writer.op("where", condition, zeros, powers, like=scores, dtype=torch.float32)
    total = reduce(writer, "sum", powers, (-1,), True)
    return writer.op("div", powers, writer.op("maximum", total, 1e-30, like=total), like=scores)


def _repeated(writer: NodeList, heads: Value, count: int) -> Value:
    """Each head several times, one behind the other."""
    *batch, few, length, size = heads.shape
    apart = (*batch, few, 1, length, size)
    many = (*batch, few, count // few, length, size)
    whole = (*batch, count, length, size)
    made = writer.op("reshape", heads, like=apart, shape=list(apart))
    made = writer.op("broadcast", made, like=many, shape=list(many))
    return writer.op("reshape", made, like=whole, shape=list(whole))
