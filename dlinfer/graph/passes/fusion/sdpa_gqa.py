"""Attention written in plain torch, and grouped-query attention, as torch's one op without repeated heads.

Three rules, in this order: attention written out becomes ``scaled_dot_product_attention``; keys and values that
were repeated for their group of query heads are passed as they are; and the queries of a group that attend from
one token become rows of one matrix.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.dialect import arguments
from dlinfer.graph.ir.layout import is_contiguous, same_size, same_sizes
from dlinfer.graph.passes.fusion.match import (
    CASTS,
    calls,
    is_last_dim,
    is_number,
    only_user,
    operands,
)
from dlinfer.graph.passes.fusion.replacement import call_like
from dlinfer.graph.passes.fusion.rule import FusionRule, Match
from dlinfer.graph.passes.fusion.views import (
    are_transposed,
    seen_through,
    shown,
    tensor,
    views_between,
)
from dlinfer.graph.passes.rewriter import Rewriter

_aten = torch.ops.aten
_SDPA = _aten.scaled_dot_product_attention.default


# --- softmax(q @ k.T * scale + mask) @ v


_TAKES_ANY_STRIDES = (_aten.contiguous.default, _aten.clone.default, _aten.reshape.default)


def _match_written_out(matmul: fx.Node) -> Match | None:
    """The mask is added, of the operands' dtype, and broadcast to the scores."""
    inside = [matmul]
    probabilities, v = _factors(matmul)
    softmax = _above_casts(probabilities, inside)
    if not calls(softmax, _aten.softmax.int) or not is_last_dim(softmax.args[1], 4):
        return None
    inside.append(softmax)
    found = _scores(_above_casts(softmax.args[0], inside))
    if found is None:
        return None
    q, transposed, mask, scale, between = found
    inside += between
    k = next((node for node in seen_through(transposed) if are_transposed(node, transposed, 2, 3)), None)
    result = only_user(matmul)
    if k is None or result is None or not _is_attention(q, k, v, mask, inside):
        return None
    if not _is_transposed_to_tokens(matmul, result):
        return None
    return Match(
        outputs=(result,),
        interior=tuple(inside),
        inputs=(q, k, v) if mask is None else (q, k, v, mask),
        values={"scale": scale},
        shared=views_between(transposed, k),
    )


def _above_casts(node: Any, inside: list[fx.Node]) -> Any:
    """The node above casts, which are put ``inside``."""
    while calls(node, *CASTS):
        inside.append(node)
        node = node.args[0]
    return node


def _scores(node: Any) -> tuple[Any, Any, Any, float, list[fx.Node]] | None:
    """q, k transposed, mask or None, scale, and the nodes between, of (q @ k.T) * scale + mask."""
    found = _scaled_product(node)
    if found is not None:
        return found[0], found[1], None, found[2], found[3]
    for product, mask in operands(node, _aten.add.Tensor):
        found = _scaled_product(product)
        if found is not None and same_sizes(shown(product).shape, shown(node).shape):
            return found[0], found[1], mask, found[2], [node, *found[3]]
    return None


def _scaled_product(node: Any) -> tuple[Any, Any, float, list[fx.Node]] | None:
    if calls(node, _aten.matmul.default):
        return *_factors(node), 1.0, [node]
    if not calls(node, _aten.mul.Tensor, _aten.div.Tensor) or len(node.args) != 2:
        return None
    product, factor = node.args
    if not is_number(factor) or not calls(product, _aten.matmul.default):
        return None
    scale = float(factor) if node.target is _aten.mul.Tensor else 1 / factor
    return *_factors(product), scale, [node, product]


def _factors(matmul: fx.Node) -> tuple[Any, Any]:
    given = arguments(matmul)
    return given["self"], given["other"]


def _is_attention(q: Any, k: Any, v: Any, mask: Any, inside: list[fx.Node]) -> bool:
    """Shapes and dtypes as the op takes them, and no rounding inside to a type that is not the operands'."""
    tq, tk, tv = tensor(q), tensor(k), tensor(v)
    if tq is None or tk is None or tv is None or not tq.dim() == tk.dim() == tv.dim() == 4:
        return False
    rounded = {value.dtype for node in inside if (value := tensor(node)) is not None}
    tm = tensor(mask)
    return (
        tq.dtype is tk.dtype is tv.dtype
        and tq.dtype.is_floating_point
        and rounded <= {tq.dtype, torch.float32}
        and same_sizes(tq.shape[:2], tk.shape[:2])
        and same_sizes(tk.shape[:3], tv.shape[:3])
        and (mask is None or (tm is not None and tm.dtype is tq.dtype and tm.dim() in (2, 4)))
    )


def _is_transposed_to_tokens(matmul: fx.Node, result: fx.Node) -> bool:
    """Whether all that is seen of the product is a packed copy of [batch, tokens, heads, size].

    The op's result has other strides than the product's; a packed copy is the same from either.
    """
    user = only_user(result)
    return (
        are_transposed(matmul, result, 1, 2)
        and calls(user, *_TAKES_ANY_STRIDES)
        and is_contiguous(shown(user))
    )


def _build_written_out(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    q, k, v, *mask = match.inputs
    masks = [_nan_where_all_is_hidden(rewriter, place, one) for one in mask]
    attention = rewriter.call(place, _SDPA, q, k, v, *masks, scale=match.values["scale"])
    return [rewriter.call(place, _aten.transpose.int, attention, 1, 2)]


def _nan_where_all_is_hidden(rewriter: Rewriter, place: fx.Node, mask: fx.Node) -> fx.Node:
    """The mask with NaN in each row that is -inf throughout.

    The written form gives NaN for such a query, and torch's op zeros. A row of the lowest finite numbers, as
    transformers makes it, gets the mean of the values from both. Layers of one mask share the result.
    """
    hidden = rewriter.call(place, _aten.eq.Scalar, mask, -math.inf)
    nothing = rewriter.call(place, _aten.all.dim, hidden, -1, True)
    return rewriter.call(place, _aten.masked_fill.Scalar, mask, nothing, math.nan)


# --- keys and values repeated for each query head of their group


def _match_repeated(attention: fx.Node) -> Match | None:
    given = arguments(attention)
    few_k, read_k = _unrepeated(given["key"])
    few_v, read_v = _unrepeated(given["value"])
    if given["enable_gqa"] or few_k is None or few_v is None:
        return None
    query, many = shown(given["query"]), [shown(given["key"]), shown(given["value"])]
    if query.dim() != 4 or not all(same_sizes(query.shape[:2], one.shape[:2]) for one in many):
        return None  # torch broadcasts heads too
    if not same_size(shown(few_k).shape[1], shown(few_v).shape[1]):
        return None
    # torch's fast kernels want it; another one would give a result of other strides.
    if not all(same_size(shown(few).stride(-1), 1) for few in (few_k, few_v)):
        return None
    return Match(
        outputs=(attention,),
        interior=(),
        inputs=(given["query"], few_k, few_v),
        values={name: given[name] for name in ("attn_mask", "dropout_p", "is_causal", "scale")},
        shared=(*read_k, *read_v),
    )


def _unrepeated(repeated: fx.Node) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
    """[batch, heads, tokens, size] of which each head was repeated, adjacently, and the nodes that repeat it."""
    many = tensor(repeated)
    if many is None or many.dim() != 4:
        return None, ()
    if calls(repeated, _aten.repeat_interleave.self_int) and arguments(repeated)["dim"] in (1, -3):
        return arguments(repeated)["self"], (repeated,)
    if not calls(repeated, _aten.reshape.default):
        return None, ()
    expanded = arguments(repeated)["self"]
    wide = shown(expanded)
    if wide.dim() != 5 or wide.stride(2) != 0:
        return None, ()
    batch, heads, times, tokens, size = wide.shape
    if not same_sizes(many.shape, (batch, heads * times, tokens, size)):
        return None, ()
    for one in seen_through(expanded):
        few = tensor(one)
        if few is not None and few.dim() == 4 and _same_but_dim_2(wide, few):
            return one, (repeated, *views_between(expanded, one))
    return None, ()


def _same_but_dim_2(wide: torch.Tensor, few: torch.Tensor) -> bool:
    strides = wide.stride()
    return (
        wide.dtype is few.dtype
        and same_sizes((*wide.shape[:2], *wide.shape[3:]), few.shape)
        and same_sizes((*strides[:2], *strides[3:]), few.stride())
        and same_size(wide.storage_offset(), few.storage_offset())
    )


def _build_grouped(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    given = match.values
    positional = (given["attn_mask"], given["dropout_p"], given["is_causal"])
    named = {"scale": given["scale"], "enable_gqa": True}
    return [call_like(rewriter, match.outputs[0], place, _SDPA, *match.inputs, *positional, **named)]


# --- one token's queries of a group, as rows of one matrix


def _match_one_token(attention: fx.Node) -> Match | None:
    given = arguments(attention)
    q, k, v, mask = (*(tensor(given[name]) for name in ("query", "key", "value")), given["attn_mask"])
    if (
        q is None
        or k is None
        or v is None
        or not given["enable_gqa"]
        or given["is_causal"]
        or given["dropout_p"] != 0
    ):
        return None
    if (
        q.dim() != 4
        or k.dim() != 4
        or not same_sizes(k.shape[:2], v.shape[:2])
        or not _is_shared_by_heads(mask)
    ):
        return None
    sizes = (*q.shape[1:], k.shape[1])
    if not all(isinstance(size, int) for size in sizes) or q.shape[2] != 1 or q.shape[1] == k.shape[1]:
        return None
    return Match(
        outputs=(attention,),
        interior=(),
        inputs=tuple(
            node for node in (given["query"], given["key"], given["value"], mask) if node is not None
        ),
        values={"scale": given["scale"]},
    )


def _is_shared_by_heads(mask: Any) -> bool:
    value = tensor(mask)
    if value is None:
        return mask is None
    rows = value.shape[:-1] if value.dim() < 4 else value.shape[1:3]
    return value.dim() in (2, 4) and all(isinstance(size, int) and size == 1 for size in rows)


def _build_one_token(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    q, k, v, *mask = match.inputs
    _, heads, _, size = shown(q).shape
    groups = shown(k).shape[1]
    rows = rewriter.call(place, _aten.reshape.default, q, [-1, groups, heads // groups, size])
    attended = rewriter.call(place, _SDPA, rows, k, v, *mask, scale=match.values["scale"])
    back = [-1, heads, 1, shown(attended).shape[3]]
    return [rewriter.call(place, _aten.reshape.default, attended, back)]


WRITTEN_OUT_ATTENTION = FusionRule(
    name="written_out_attention",
    why="One pass over keys and values; the scores [batch, heads, tokens, tokens] are never in memory.",
    anchors=(_aten.matmul.default,),
    match=_match_written_out,
    build=_build_written_out,
)

GROUPED_ATTENTION = FusionRule(
    name="grouped_attention",
    why="Reads keys and values where they are instead of copying them once for each query head of a group.",
    anchors=(_SDPA,),
    match=_match_repeated,
    build=_build_grouped,
)

ONE_TOKEN_ATTENTION = FusionRule(
    name="one_token_attention",
    why="In a decode step the query heads of a group share one pass over their keys, as rows of one product.",
    anchors=(_SDPA,),
    match=_match_one_token,
    build=_build_one_token,
)
