"""Fuse a mixture of experts, as HF transformers 5 writes it, into ``fused_moe``.

HF has three forms, and the rule matches two of them:

- ``grouped_mm`` sorts the tokens by expert, and computes one product over the groups.
- ``batched_mm`` gathers the weights of the chosen experts, and computes one batched product.

The third form is a Python loop over the chosen experts, which breaks the graph.
"""

import torch
from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import tensor_of, tensors_of
from dlinfer.graph.ir.layout import is_contiguous, is_static, same_size, same_sizes
from dlinfer.graph.passes.fusion.match import (
    CASTS,
    FLOATS,
    aten,
    calls,
    dtype_of,
    only_user,
    same_shape,
    widened_from,
)
from dlinfer.graph.passes.fusion.pattern import (
    Bindings,
    Part,
    Pattern,
    any_of,
    both,
    call,
    cut_from,
    item,
    loose_call,
    matches,
    number,
    shared,
    through_casts,
    transposed,
)
from dlinfer.graph.passes.fusion.rule import Match, by, fusion_rule
from dlinfer.graph.passes.fusion.views import halves

_TOPK = call(
    aten.topk.default,
    both("softmax", call(aten.softmax.int, "logits", -1, dtype=...)),
    number("k"),
    -1,
    sorted=...,
)


def _match_gating(topk: fx.Node) -> Match | None:
    bound = next(matches(_TOPK, topk), None)
    if bound is None:
        return None
    logits, interior = bound["logits"], bound.interior
    if only_user(logits) is bound["softmax"]:
        source, casts = widened_from(logits)  # only exact casts: rounding may change the chosen experts
        if all(only_user(cast) is not None for cast in casts):
            logits, interior = source, (*interior, *casts)
    dtype = dtype_of(logits)
    if dtype not in FLOATS or dtype_of(bound["softmax"]) is not torch.promote_types(dtype, torch.float32):
        return None
    if not all(map(is_contiguous, tensors_of(topk))):
        return None
    build = by(ops.moe_gating_topk_softmax.overload, int(bound.numbers["k"]), -1)
    return Match((topk,), interior, (logits,), build)


MOE_GATING = fusion_rule(
    name="moe_gating",
    why="One call computes softmax and topk of each token's few numbers.",
    anchors=(aten.topk.default,),
    match=_match_gating,
)


# --- the experts

_RESHAPES = (aten.reshape.default, aten.view.default)


def _flattened(name: str) -> Pattern:
    """Return a pattern of the tensor ``name`` [tokens, topk] reshaped to [tokens * topk]."""
    return both(f"flat_{name}", loose_call(_RESHAPES, name))


def _activated(whole: Part) -> Pattern:
    """Return a pattern of ``silu(x[..., :half]) * x[..., half:]``. whole: the pattern of x."""
    return cut_from(whole, halves, call(aten.mul.Tensor, call(aten.silu.default, "first"), "second"))


def _weighted(results: Part, weights: Part) -> Pattern:
    return call(aten.mul.Tensor, results, call(aten.unsqueeze.default, weights, -1))


# Each pair of token and expert has its own copy of the expert's weights.
def _batched_product(weights: str, rows: Part) -> Pattern:
    """Return a pattern of ``weights[ids] @ row`` for each row."""
    picked = call(aten.index.Tensor, weights, [_flattened("ids")])
    return call(aten.squeeze.dim, call(aten.bmm.default, picked, call(aten.unsqueeze.default, rows, -1)), -1)


_REPEATED = call(aten.repeat_interleave.self_int, "hidden_states", number("topk"), -2)
_BATCHED = _weighted(
    _batched_product("down", _activated(_batched_product("gate_up", _REPEATED))), _flattened("weights")
)

# The pairs of token and expert are sorted by expert. Each expert's product is over its group of rows.
_SORT = call(aten.sort.default, _flattened("ids"), -1)
_ORDER = both("order", item(_SORT, 1))
_COUNTS = call(aten.histc.default, through_casts(item(_SORT, 0)), number("experts"), 0, number("last_expert"))
_ENDS = loose_call(aten.cumsum.default, _COUNTS)


def _grouped_product(weights: str, rows: Part) -> Pattern:
    """Return a pattern of ``rows @ weights[expert].T``, by torch's op or by the fallback op of transformers."""
    names = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
    return loose_call(names, rows, transposed(weights, 1, 2), _ENDS)


_INVERSE_ORDER = call(  # inverse = empty_like(order); inverse[order] = arange(len(order))
    aten.index_put.default,
    loose_call(aten.empty_like.default, _ORDER),
    ["order"],
    both("places", shared(loose_call(aten.arange.default))),
)
_SORTED_ROWS = call(
    aten.index.Tensor, "hidden_states", [call(aten.floor_divide.default, _ORDER, number("topk"))]
)
_GROUPED = call(
    aten.index.Tensor,
    _weighted(
        _grouped_product("down", _activated(_grouped_product("gate_up", _SORTED_ROWS))),
        call(aten.index.Tensor, _flattened("weights"), [_ORDER]),
    ),
    [_INVERSE_ORDER],
)
_EXPERTS = call(aten.sum.dim_IntList, both("pairs", loose_call(_RESHAPES, any_of(_BATCHED, _GROUPED))), [-2])


def _match_experts(total: fx.Node) -> Match | None:
    for bound in matches(_EXPERTS, total):
        output = _output(bound["hidden_states"], total)
        if output is None or not _fits(bound) or not is_contiguous(tensor_of(output)):
            continue
        weights, division = _renormalised(bound)
        inputs = (*(bound[name] for name in ("hidden_states", "gate_up", "down")), weights, bound["ids"])
        build = by(ops.fused_moe.overload, tensor_of(bound["ids"]).shape[1], bool(division))
        inside = (*bound.interior, *division, *([] if output is total else [total]))
        return Match((output,), inside, inputs, build, bound.shared)
    return None


def _output(hidden_states: fx.Node, total: fx.Node) -> fx.Node | None:
    """Return the node that ends the block.

    This is ``total``, if it has the dtype of ``hidden_states``. Otherwise it is the only user of ``total``, if this
    user casts to that dtype. Return None if neither is so.
    """
    dtype = dtype_of(hidden_states)
    if dtype_of(total) is dtype:
        return total
    cast = only_user(total)
    return cast if calls(cast, *CASTS) and dtype_of(cast) is dtype else None


def _fits(bound: Bindings) -> bool:
    names = ("hidden_states", "gate_up", "down", "weights", "ids", "flat_weights", "flat_ids")
    x, gate_up, down, weights, ids, flat_weights, flat_ids = (tensor_of(bound[name]) for name in names)
    experts = bound.numbers.get("experts", gate_up.shape[0])
    return (
        x.dim() == ids.dim() == 2
        and flat_weights.dim() == flat_ids.dim() == 1
        and gate_up.dim() == down.dim() == 3
        and x.dtype in FLOATS
        and x.dtype is gate_up.dtype is down.dtype
        and weights.dtype in FLOATS
        and same_sizes(weights.shape, ids.shape)
        and same_sizes(tensor_of(bound["pairs"]).shape, (*ids.shape, x.shape[1]))
        and same_size(x.shape[0], ids.shape[0])
        and is_static(ids.shape[1])
        and ids.shape[1] == bound.numbers["topk"]
        and same_size(gate_up.shape[0], experts)
        and bound.numbers.get("last_expert", experts - 1) == experts - 1
        and ("places" not in bound.nodes or same_shape(bound["places"], bound["order"]))
    )


def _renormalised(bound: Bindings) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Return the weights before their division by their sum, and the nodes of this division.

    If there is no division, or something else uses its result, return the bound weights and no nodes.
    """
    weights = bound["weights"]
    division = call(aten.div.Tensor, "raw", both("sum", call(aten.sum.dim_IntList, "raw", [-1], True)))
    if all(user in bound.interior for user in weights.users):
        for inner in matches(division, weights):
            if only_user(inner["sum"]) is weights:
                return inner["raw"], (weights, inner["sum"])
    return weights, ()


MOE_EXPERTS = fusion_rule(
    name="moe_experts",
    why=(
        "One call for each block reads each chosen expert's weights in place, once for all of the "
        "expert's tokens."
    ),
    anchors=(aten.sum.dim_IntList,),
    match=_match_experts,
)
