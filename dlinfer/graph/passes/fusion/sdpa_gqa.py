"""Fuse attention written in plain torch, and grouped-query attention, into ``scaled_dot_product_attention``.

There are three rules, in this order:

- Attention written out becomes torch's op.
- If the model repeats keys and values for each query head of their group, the op gets them without the repetition.
- For one token, the query heads of a group become rows of one matrix.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import fx

from dlinfer.graph.ir.dialect import arguments, tensor_of, tensor_or_none
from dlinfer.graph.ir.layout import is_contiguous, is_static, same_size, same_sizes
from dlinfer.graph.passes.fusion.match import aten, calls, dtype_of, only_user, same_shape
from dlinfer.graph.passes.fusion.pattern import (
    Bindings,
    Pattern,
    any_of,
    both,
    call,
    loose_call,
    matches,
    number,
    shared,
    through_casts,
    transposed,
    view_of,
)
from dlinfer.graph.passes.fusion.rule import Match, by, fusion_rule
from dlinfer.graph.passes.fusion.views import are_transposed
from dlinfer.graph.passes.rewriter import Rewriter

_SDPA = aten.scaled_dot_product_attention.default


# --- softmax(q @ k.T * scale + mask) @ v

_TAKES_ANY_STRIDES = (aten.contiguous.default, aten.clone.default, aten.reshape.default)

_PRODUCT = call(aten.matmul.default, "q", transposed("k", 2, 3))
_SCALED = any_of(
    _PRODUCT,
    call(aten.mul.Tensor, _PRODUCT, number("factor")),
    call(aten.div.Tensor, _PRODUCT, number("divisor")),
)
_SCORES = any_of(_SCALED, both("scores", call(aten.add.Tensor, both("product", _SCALED), "mask")))
_SOFTMAX = call(aten.softmax.int, through_casts(_SCORES), -1, dtype=...)
_WRITTEN_OUT = call(aten.matmul.default, through_casts(_SOFTMAX), "v")


def _match_written_out(matmul: fx.Node) -> Match | None:
    """Match attention written out. The mask must have the operands' dtype, and be broadcast to the scores."""
    result = only_user(matmul)
    if result is None or not _is_transposed_to_tokens(matmul, result):
        return None
    for bound in matches(_WRITTEN_OUT, matmul):
        mask = bound.nodes.get("mask")
        inside = (matmul, *bound.interior)
        if not _is_attention(bound["q"], bound["k"], bound["v"], mask, inside):
            continue
        if mask is not None and not same_shape(bound["product"], bound["scores"]):
            continue
        scale = bound.numbers.get("factor", 1 / bound.numbers.get("divisor", 1.0))
        inputs = (bound["q"], bound["k"], bound["v"], *([] if mask is None else [mask]))
        build = partial(_build_written_out, scale=float(scale))
        return Match((result,), inside, inputs, build, bound.shared)
    return None


def _is_attention(
    q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, inside: Sequence[fx.Node]
) -> bool:
    """Return whether torch's op takes these shapes and dtypes, and no node inside rounds to another dtype."""
    tq, tk, tv, tm = tensor_of(q), tensor_of(k), tensor_of(v), tensor_or_none(mask)
    if not tq.dim() == tk.dim() == tv.dim() == 4:
        return False
    rounded = {dtype_of(node) for node in inside}
    return (
        tq.dtype is tk.dtype is tv.dtype
        and tq.dtype.is_floating_point
        and rounded <= {tq.dtype, torch.float32}
        and same_sizes(tq.shape[:2], tk.shape[:2])
        and same_sizes(tk.shape[:3], tv.shape[:3])
        and (mask is None or (tm is not None and tm.dtype is tq.dtype and tm.dim() in (2, 4)))
    )


def _is_transposed_to_tokens(matmul: fx.Node, result: fx.Node) -> bool:
    """Return whether ``result`` is ``matmul`` as [batch, tokens, heads, size], and is used only for a contiguous copy.

    The result of torch's op has other strides than the matrix product. In a contiguous copy, the strides are the same.
    """
    user = only_user(result)
    is_copied = calls(user, *_TAKES_ANY_STRIDES) and is_contiguous(tensor_of(user))
    return is_copied and are_transposed(matmul, result, 1, 2)


def _build_written_out(
    rewriter: Rewriter, match: Match, place: fx.Node, *, scale: float
) -> Sequence[fx.Node]:
    q, k, v, *mask = match.inputs
    masks = [_nan_where_all_is_hidden(rewriter, place, node) for node in mask]
    attention = rewriter.call(place, _SDPA, q, k, v, *masks, scale=scale)
    return [rewriter.call(place, aten.transpose.int, attention, 1, 2)]


def _nan_where_all_is_hidden(rewriter: Rewriter, place: fx.Node, mask: fx.Node) -> fx.Node:
    """Return the mask, with NaN in each row that has only -inf.

    For such a row, attention written out returns NaN, and torch's op returns zeros. A row of the lowest finite number,
    as in transformers' masks, needs no change: both return the mean of the values. Layers with the same mask share the
    new mask.
    """
    hidden = rewriter.call(place, aten.eq.Scalar, mask, -math.inf)
    nothing = rewriter.call(place, aten.all.dim, hidden, -1, True)
    return rewriter.call(place, aten.masked_fill.Scalar, mask, nothing, math.nan)


# --- keys and values repeated for each query head of their group


def _is_expanded(few: fx.Node, wide: fx.Node) -> bool:
    """Return whether ``wide`` [batch, heads, times, tokens, size] is ``few``, repeated by a stride of 0."""
    source, many = tensor_or_none(few), tensor_of(wide)
    if source is None or source.dim() != 4 or many.dim() != 5 or many.stride(2) != 0:
        return False
    strides = many.stride()
    return (
        source.dtype is many.dtype
        and same_sizes((*many.shape[:2], *many.shape[3:]), source.shape)
        and same_sizes((*strides[:2], *strides[3:]), source.stride())
        and same_size(many.storage_offset(), source.storage_offset())
    )


def _repeated(name: str) -> Pattern:
    """Return a pattern of the tensor ``name``, with copies of each head right behind the head."""
    expanded = both(f"expanded_{name}", view_of(name, _is_expanded))
    interleaved = call(aten.repeat_interleave.self_int, name, ..., -3, output_size=...)
    return shared(any_of(interleaved, loose_call(aten.reshape.default, expanded)))


_GROUPED = call(
    _SDPA,
    "query",
    _repeated("key"),
    _repeated("value"),
    attn_mask=...,
    dropout_p=...,
    is_causal=...,
    scale=...,
)


def _match_repeated(attention: fx.Node) -> Match | None:
    bound = next(matches(_GROUPED, attention), None)
    if bound is None or not all(_joins_heads(bound, attention, name) for name in ("key", "value")):
        return None
    key, value = tensor_of(bound["key"]), tensor_of(bound["value"])
    # torch's fast kernels need adjacent features; another kernel would give a result of other strides.
    is_fast = all(same_size(few.stride(-1), 1) for few in (key, value))
    if not is_fast or not same_size(key.shape[1], value.shape[1]):
        return None
    by_name = arguments(attention)
    more = [by_name[name] for name in ("attn_mask", "dropout_p", "is_causal")]
    build = by(_SDPA, *more, scale=by_name["scale"], enable_gqa=True)
    inputs = (bound["query"], bound["key"], bound["value"])
    return Match((attention,), (), inputs, build, bound.shared)


def _joins_heads(bound: Bindings, attention: fx.Node, name: str) -> bool:
    """Return whether the repeated tensor has the query's batch and heads.

    torch would also broadcast other numbers of heads. name: ``key`` or ``value``.
    """
    query, many = tensor_of(bound["query"]), tensor_of(arguments(attention)[name])
    if not query.dim() == many.dim() == 4 or not same_sizes(query.shape[:2], many.shape[:2]):
        return False
    expanded = bound.nodes.get(f"expanded_{name}")
    if expanded is None:
        return True
    batch, heads, times, tokens, size = tensor_of(expanded).shape
    return same_sizes(many.shape, (batch, heads * times, tokens, size))


# --- one token's queries of a group, as rows of one matrix

_ONE_TOKEN = call(_SDPA, "query", "key", "value", attn_mask=any_of(None, "mask"), scale=..., enable_gqa=True)


def _match_one_token(attention: fx.Node) -> Match | None:
    bound = next(matches(_ONE_TOKEN, attention), None)
    if bound is None or not _is_shared_by_heads(bound.nodes.get("mask")):
        return None
    q, k, v = (tensor_of(bound[name]) for name in ("query", "key", "value"))
    if not q.dim() == k.dim() == 4 or not same_sizes(k.shape[:2], v.shape[:2]):
        return None
    sizes = (*q.shape[1:], k.shape[1])
    if not is_static(*sizes) or q.shape[2] != 1 or q.shape[1] == k.shape[1]:
        return None
    return Match((attention,), (), tuple(bound.nodes.values()), _build_one_token)


def _is_shared_by_heads(mask: fx.Node | None) -> bool:
    if mask is None:
        return True
    value = tensor_of(mask)
    rows = value.shape[:-1] if value.dim() < 4 else value.shape[1:3]
    return value.dim() in (2, 4) and all(same_size(size, 1) for size in rows)


def _build_one_token(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    q, k, v, *mask = match.inputs
    _, heads, _, size = tensor_of(q).shape
    groups = tensor_of(k).shape[1]
    rows = rewriter.call(place, aten.reshape.default, q, [-1, groups, heads // groups, size])
    scale = arguments(match.outputs[0])["scale"]
    attended = rewriter.call(place, _SDPA, rows, k, v, *mask, scale=scale)
    back = [-1, heads, 1, tensor_of(attended).shape[3]]
    return [rewriter.call(place, aten.reshape.default, attended, back)]


WRITTEN_OUT_ATTENTION = fusion_rule(
    name="written_out_attention",
    why="One pass over keys and values; the scores [batch, heads, tokens, tokens] are never in memory.",
    anchors=(aten.matmul.default,),
    match=_match_written_out,
)

GROUPED_ATTENTION = fusion_rule(
    name="grouped_attention",
    why="Reads keys and values where they are instead of copying them once for each query head of a group.",
    anchors=(_SDPA,),
    match=_match_repeated,
)

ONE_TOKEN_ATTENTION = fusion_rule(
    name="one_token_attention",
    why="In a decode step the query heads of a group share one pass over their keys, as rows of one product.",
    anchors=(_SDPA,),
    match=_match_one_token,
)
