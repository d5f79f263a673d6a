"""Scaled dot-product attention with masks, causality and grouped heads, over keys and values or over a cache.

With grouped heads, the query heads of one key head are stacked as rows of one matrix product. So keys and values are
not repeated.

If the graph has just written rows of a cache (``written.Rows``), attention reads the old cache and the new rows, and
does not build the whole new cache. At the positions of the new rows, scores with the new keys replace scores with the
old keys. In the product with the values, the probabilities at these positions multiply the new values, and 0 multiplies
the old values. The result is NaN if an old value is NaN or infinite. It is wrong if a position is written twice. The
model detects both cases, and torch then runs the graph instead.
"""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output
from torch import Tensor

from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.creation import iota
from dlinfer.vendor.openvino.lowerings.matrix import product
from dlinfer.vendor.openvino.lowerings.ordering import sorted_first
from dlinfer.vendor.openvino.lowerings.shapes import leading, rank, repeated, times_of
from dlinfer.vendor.openvino.lowerings.slicing import FURTHEST, cut
from dlinfer.vendor.openvino.registry import Call, lowers
from dlinfer.vendor.openvino.written import Rows

aten = torch.ops.aten
I64, F32 = ov.Type.i64, ov.Type.f32


def _taken(call: Call) -> str | None:
    q, k = call.fake("query"), call.fake("key")
    if q.dim() < 2 or k.dim() != q.dim() or call.fake("value").dim() != q.dim():
        return "queries, keys and values have different ranks"
    if call.arguments.get("dropout_p"):
        return "dropout"
    if call.arguments.get("is_causal") and call.arguments.get("attn_mask") is not None:
        return "the attention has a mask and is_causal=True"
    if fixed_size(q.shape[-1]) is None:
        return "the head size is not fixed"
    if not q.is_floating_point():
        return "the attention is over integers"
    groups, reason = _groups(call)
    if reason is None and not _alike(call, groups):
        return (
            "keys or values are repeated for the queries' heads or batch, which OpenVINO gets wrong in "
            "16 bits"
        )
    return reason


def _alike(call: Call, groups: int) -> bool:
    """Return whether queries, keys and values have equal batch sizes and, unless heads are grouped, equal heads."""
    shapes = [list(map(str, call.fake(name).shape[:-2])) for name in ("query", "key", "value")]
    if groups > 1:
        shapes[0][-1] = shapes[1][-1]
    return shapes[0] == shapes[1] == shapes[2]


def _groups(call: Call) -> tuple[int, str | None]:
    """Return two values: how many query heads read each key head, and a reason to refuse the call or None."""
    if not call.arguments.get("enable_gqa") or call.fake("query").dim() < 3:
        return 1, None
    heads = [fixed_size(call.fake(name).shape[-3]) for name in ("query", "key", "value")]
    if None in heads or not heads[1]:
        return 1, "the number of grouped heads is not fixed"
    if heads[1] != heads[2] or call.fake("query").dim() != 4:
        return 1, "keys and values have different numbers of heads"
    return int(heads[0] or 0) // heads[1], None


@lowers(aten.scaled_dot_product_attention.default, refuses=_taken, takes_rows=True)
def attention(
    b: Builder,
    q: Output,
    k: Output | Rows,
    v: Output | Rows,
    mask: Output | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> Output:
    q = _tensor(b, q)
    mask = None if mask is None else _tensor(b, mask)
    size = b.size(q, -1)
    assert isinstance(size, int)
    factor = size**-0.5 if scale is None else scale
    groups, _ = _groups(b.call)
    keys = _base(k)
    additive, seen = _additive(b, q, keys, mask, is_causal)
    rows, additive = _grouped(b, q, additive, groups) if groups > 1 else (q, additive)
    if isinstance(k, Rows) and isinstance(v, Rows) and _writes_keys(k, v):
        result = _over_rows(b, rows, k, v, additive, factor)
    else:
        k, v = _tensor(b, k), _tensor(b, v)
        result = _over_tensors(b, rows, k, v, additive, factor)
    if groups > 1:
        result = _ungrouped(b, result, q, b.size(_base(v), -1))
    if seen is not None:
        result = op.select(seen, result, b.scalar(0, result.get_element_type())).output(0)
    return result


def _tensor(b: Builder, value: Output | Rows) -> Output:
    if isinstance(value, Rows):
        if value.full is None:
            b.notes.append("a cache is copied at each call: attention needs all of its new content")
        return value.whole()
    return value


def _base(value: Output | Rows) -> Output:
    return value.base if isinstance(value, Rows) else value


def _writes_keys(k: Rows, v: Rows) -> bool:
    """Return whether the new rows of both caches are whole tokens, with all heads, at the same places."""
    names = [rows.index.get_node().get_friendly_name() for rows in (k, v)]
    return k.dim == v.dim == rank(k.base) - 2 and (k.index == v.index or names[0] == names[1])


# --- masks


def _additive(
    b: Builder, q: Output, k: Output, mask: Output | None, causal: bool
) -> tuple[Output | None, Output | None]:
    """Return two values: what to add to the scores, and whether each query sees any key.

    The first is None if nothing is added, the second if every query sees a key. torch returns 0 for a query that sees
    no key."""
    kind = q.get_element_type()
    if causal:
        mask = _causal(b, q, k)
    if mask is None:
        return None, None
    fake = b.call.fake("attn_mask")
    if causal or (isinstance(fake, Tensor) and fake.dtype is torch.bool):
        seen = None if causal else op.reduce_logical_or(mask, b.axes([rank(mask) - 1]), True).output(0)
        return op.select(mask, b.scalar(0.0, kind), b.scalar(float("-inf"), kind)).output(0), seen
    mask = b.cast(mask, kind)
    # NaN counts as seen, as in torch.
    visible = op.not_equal(b.cast(mask, F32), b.scalar(float("-inf"), F32))
    return mask, op.reduce_logical_or(visible, b.axes([rank(mask) - 1]), True).output(0)


def _causal(b: Builder, q: Output, k: Output) -> Output:
    """Return a mask [queries, keys]: query i sees keys 0..i."""
    queries, keys = (iota(b, b.size(x, -2)) for x in (q, k))
    return op.greater_equal(op.unsqueeze(queries, b.axes([1])), op.unsqueeze(keys, b.axes([0]))).output(0)


# --- grouped heads


def _grouped(b: Builder, q: Output, mask: Output | None, groups: int) -> tuple[Output, Output | None]:
    """Reshape q [batch, heads, queries, size] to [batch, key heads, groups * queries, size], and the mask to match.

    All query heads of a key head are then rows of one product.
    mask: None, or a tensor that broadcasts to the scores."""
    heads, size = b.size(q, 1), b.size(q, 3)
    assert isinstance(heads, int) and isinstance(size, int)
    rows = op.reshape(q, b.axes([0, heads // groups, -1, size]), True).output(0)
    if mask is None or (b.size(q, 2) == 1 and _one_head(b, mask)):
        return rows, mask
    mask = leading(b, mask, 4)
    one_head = b.size(mask, 1) == 1
    batch, _, queries, keys = (b.size(mask, dim) for dim in range(4))
    if queries == 1 and b.size(q, 2) != 1:  # one row for all queries
        if one_head:
            return rows, mask
        queries = b.size(q, 2)
        mask = repeated(b, mask, [1, 1, queries, 1])
    elif one_head:
        mask = repeated(b, op.unsqueeze(mask, b.axes([2])).output(0), [1, 1, groups, 1, 1])
    key_heads = 1 if one_head else heads // groups
    sizes = [batch, key_heads, times_of(b, queries, groups), keys]
    return rows, op.reshape(mask, b.numbers(sizes), False).output(0)


def _one_head(b: Builder, mask: Output) -> bool:
    return rank(mask) < 3 or b.size(mask, rank(mask) - 3) == 1


def _ungrouped(b: Builder, x: Output, q: Output, size: Any) -> Output:
    sizes = [b.size(q, 0), b.size(q, 1), b.size(q, 2), size]
    return op.reshape(x, b.numbers(sizes), False).output(0)


# --- the products


def _over_tensors(b: Builder, q: Output, k: Output, v: Output, mask: Output | None, scale: float) -> Output:
    kind = q.get_element_type()
    if rank(q) == 4:
        bias = b.scalar(0.0, kind) if mask is None else leading(b, mask, 4)
        result = op.scaled_dot_product_attention(q, k, v, bias, b.scalar(scale, kind), causal=False)
        return result.output(0)
    scores = _scaled(b, product(q, k, False, True), mask, scale)
    return product(op.softmax(scores, rank(scores) - 1).output(0), v)


def _scaled(b: Builder, scores: Output, mask: Output | None, scale: float) -> Output:
    scores = op.multiply(scores, b.scalar(scale, scores.get_element_type())).output(0)
    return scores if mask is None else op.add(scores, mask).output(0)


def _over_rows(b: Builder, q: Output, k: Rows, v: Rows, mask: Output | None, scale: float) -> Output:
    _look_for_repeated(b, v)
    last = b.scalar(rank(q) - 1, I64)
    old = product(q, k.base, False, True)
    new = product(q, k.source, False, True)
    scores = op.scatter_update(old, k.index, new, last).output(0)
    shares = op.softmax(_scaled(b, scores, mask, scale), rank(q) - 1).output(0)
    fresh = op.gather(shares, k.index, last).output(0)
    nothing = op.multiply(fresh, b.scalar(0.0, fresh.get_element_type()))
    stale = op.scatter_update(shares, k.index, nothing, last).output(0)
    remembered = product(stale, v.base)
    b.nan_fault(
        remembered, "attention returned NaN, perhaps from old content of KV cache slots that the call writes"
    )
    return op.add(remembered, product(fresh, v.source)).output(0)


def _look_for_repeated(b: Builder, v: Rows) -> None:
    """Let torch run every call that writes to a place of the cache twice."""
    if v.unique or b.size(v.index, 0) == 1:
        return
    key = ("repeated", v.index.get_node().get_friendly_name(), v.index.get_index())
    if key not in b.places:
        ordered, _ = sorted_first(b, v.index, b.size(v.index, 0), 0, False)
        steps = op.subtract(cut(b, ordered, 0, 1, FURTHEST), cut(b, ordered, 0, 0, -1))
        b.places[key] = op.equal(steps, b.scalar(0, I64)).output(0)
        b.fault(b.places[key], "a slot of the KV cache is written twice")
