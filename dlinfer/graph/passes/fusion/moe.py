"""Mixture of experts as HF transformers 5 writes it.

``grouped_mm`` (sort the tokens by expert, one product over the groups) and ``batched_mm`` (gather the chosen
experts' weights, one batched product) are single graphs and become ``fused_moe``. The third form, a Python loop
over the experts that were hit, cannot be captured: how often it runs depends on values, and Dynamo breaks the
graph there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import arguments, op_name, tensors_of
from dlinfer.graph.ir.layout import is_contiguous, same_size, same_sizes
from dlinfer.graph.passes.fusion.match import CASTS, calls, only_user, operands, widened_from
from dlinfer.graph.passes.fusion.replacement import call_like
from dlinfer.graph.passes.fusion.rule import FusionRule, Match
from dlinfer.graph.passes.fusion.views import (
    are_transposed,
    halves,
    seen_through,
    shown,
    views_between,
)
from dlinfer.graph.passes.rewriter import Rewriter

_aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # what the ops take


# --- softmax over all experts, and the topk of them


def _match_gating(topk: fx.Node) -> Match | None:
    given = arguments(topk)
    softmax, k = given["self"], given["k"]
    if softmax.target is not _aten.softmax.int or not isinstance(k, int) or not given["largest"]:
        return None
    last = shown(softmax).dim() - 1
    if given["dim"] not in (-1, last) or arguments(softmax)["dim"] not in (-1, last):
        return None
    logits, interior = arguments(softmax)["self"], [softmax]
    if only_user(logits) is softmax:
        source, casts = widened_from(logits)  # a cast that rounds decides between experts
        if all(only_user(one) is not None for one in casts):
            logits, interior = source, [*interior, *casts]
    dtype = shown(logits).dtype
    if dtype not in _FLOATS or shown(softmax).dtype is not torch.promote_types(dtype, torch.float32):
        return None
    if not all(map(is_contiguous, tensors_of(topk))):
        return None
    return Match(outputs=(topk,), interior=tuple(interior), inputs=(logits,), values={"k": k})


def _build_gating(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    gating = ops.moe_gating_topk_softmax.overload
    return [call_like(rewriter, match.outputs[0], place, gating, match.inputs[0], match.values["k"], -1)]


MOE_GATING = FusionRule(
    name="moe_gating",
    why="Softmax and topk of a few numbers a token in one call.",
    anchors=(_aten.topk.default,),
    match=_match_gating,
    build=_build_gating,
)


# --- the experts


class _Unlike(Exception):
    """The node is not what a block of experts has at this place."""


@dataclass
class _Experts:
    """Walks up from a block's sum over each token's experts and notes what it meets.

    inside: nodes that the op replaces; shared: the same of nodes that other layers may use too.
    """

    inside: list[fx.Node] = field(default_factory=list)
    shared: list[fx.Node] = field(default_factory=list)
    given: dict[str, fx.Node] = field(default_factory=dict)
    renormalize: bool = False

    def take(self, node: Any, *targets: Any) -> dict[str, Any]:
        """The arguments of a node that must call one of ``targets``."""
        _need(calls(node, *targets))
        self.inside.append(node)
        return arguments(node)

    def note(self, **given: Any) -> None:
        """What the op reads; a second mention must be of the same node."""
        for name, node in given.items():
            _need(isinstance(node, fx.Node) and self.given.setdefault(name, node) is node)

    def flattened(self, node: Any) -> fx.Node:
        """The [tokens, topk] of which ``node`` is the [tokens * topk]."""
        source = self.take(node, _aten.reshape.default, _aten.view.default)["self"]
        _need(shown(source).dim() == 2 and shown(node).dim() == 1)
        return source

    def picked(self, node: Any) -> tuple[fx.Node, fx.Node]:
        """table and rows of table[rows]."""
        given = self.take(node, _aten.index.Tensor)
        _need(len(given["indices"]) == 1 and isinstance(given["indices"][0], fx.Node))
        return given["self"], given["indices"][0]

    def activated(self, node: Any) -> fx.Node:
        """x of silu(x[..., :half]) * x[..., half:]."""
        for silu, up in operands(node, _aten.mul.Tensor):
            if calls(silu, _aten.silu.default) and isinstance(up, fx.Node):
                gate = arguments(silu)["self"]
                whole = halves(gate, up)
                _need(whole is not None)
                assert whole is not None
                self.inside += [node, silu]
                self.shared += [*views_between(gate, whole), *views_between(up, whole)]
                return whole
        raise _Unlike


def _need(condition: object) -> None:
    if not condition:
        raise _Unlike


def _match_experts(total: fx.Node) -> Match | None:
    found = _Experts()
    try:
        given = found.take(total, _aten.sum.dim_IntList)
        _need(given["dim"] == [1] and not given["keepdim"] and given["dtype"] is None)
        pairs = found.take(given["self"], _aten.view.default, _aten.reshape.default)["self"]
        (_read_grouped if calls(pairs, _aten.index.Tensor) else _read_batched)(found, pairs)
        output = _output(found, total)
        _need(_fits(found.given, shown(given["self"])) and is_contiguous(shown(output)))
    except _Unlike:
        return None
    _take_renormalisation(found)
    inputs = tuple(found.given[name] for name in ("hidden_states", "gate_up", "down", "weights", "ids"))
    return Match(
        outputs=(output,),
        interior=tuple(node for node in found.inside if node is not output),
        inputs=inputs,
        values={"topk": shown(found.given["ids"]).shape[1], "renormalize": found.renormalize},
        shared=tuple(found.shared),
    )


def _weighted(found: _Experts, node: Any) -> tuple[Any, Any]:
    """results [pairs, hidden] and scales [pairs] of results * scales[:, None]."""
    given = found.take(node, _aten.mul.Tensor)
    scales = found.take(given["other"], _aten.unsqueeze.default)
    _need(scales["dim"] in (1, -1))
    return given["self"], scales["self"]


def _read_batched(found: _Experts, pairs: Any) -> None:
    """Each pair of token and expert has its own copy of the expert's weights."""

    def product(node: Any) -> tuple[Any, Any, Any]:
        """weights, expert ids and rows of weights[ids] @ row, for each row."""
        bmm = found.take(found.take(node, _aten.squeeze.dim)["self"], _aten.bmm.default)
        weights, ids = found.picked(bmm["self"])
        return weights, ids, found.take(bmm["mat2"], _aten.unsqueeze.default)["self"]

    results, scales = _weighted(found, pairs)
    down, flat_ids, activated = product(results)
    gate_up, same_ids, rows = product(found.activated(activated))
    _need(flat_ids is same_ids)
    repeated = found.take(rows, _aten.repeat_interleave.self_int)
    ids = found.flattened(flat_ids)
    _need(repeated["dim"] == 0 and same_size(repeated["repeats"], shown(ids).shape[1]))
    weights = found.flattened(scales)
    found.note(hidden_states=repeated["self"], gate_up=gate_up, down=down, weights=weights, ids=ids)


def _read_grouped(found: _Experts, pairs: Any) -> None:
    """The pairs are sorted by expert; each expert's product is over its group of rows."""
    sorted_pairs, inverse = found.picked(pairs)
    order = _inverted(found, inverse)
    results, scales = _weighted(found, sorted_pairs)
    flat_weights, rows = found.picked(scales)
    _need(rows is order)
    down, activated, ends = _grouped_product(found, results)
    gate_up, tokens, same_ends = _grouped_product(found, found.activated(activated))
    _need(ends is same_ends)
    hidden_states, rows = found.picked(tokens)
    divided = found.take(rows, _aten.floor_divide.default)
    sort = order.args[0]
    sorted_ids = _counted(found, ends, experts=shown(gate_up).shape[0])
    _need(calls(order, getitem) and order.args[1] == 1 and calls(sorted_ids, getitem))
    _need(sorted_ids.args == (sort, 0) and divided["self"] is order)
    found.inside += [order, sorted_ids]
    sorting = found.take(sort, _aten.sort.default)
    ids = found.flattened(sorting["self"])
    _need(not sorting["descending"] and same_size(divided["other"], shown(ids).shape[1]))
    weights = found.flattened(flat_weights)
    found.note(hidden_states=hidden_states, gate_up=gate_up, down=down, weights=weights, ids=ids)


def _inverted(found: _Experts, inverse: Any) -> fx.Node:
    """p of ``inverse = empty_like(p); inverse[p] = arange(len(p))``."""
    given = found.take(inverse, _aten.index_put.default)
    _need(len(given["indices"]) == 1 and not given["accumulate"])
    (order,) = given["indices"]
    found.take(given["self"], _aten.empty_like.default)
    _need(calls(given["values"], _aten.arange.default))
    found.shared.append(given["values"])
    _need(same_sizes(shown(given["values"]).shape, shown(order).shape))
    return order


def _grouped_product(found: _Experts, node: Any) -> tuple[fx.Node, fx.Node, fx.Node]:
    """weights [experts, out, in], rows and ends of the groups of rows @ weights[expert].T.

    transformers calls torch's op or, where that cannot be compiled, one of its own.
    """
    _need(isinstance(node, fx.Node) and op_name(node) in _GROUPED_PRODUCTS)
    found.inside.append(node)
    rows, transposed, ends, *_ = arguments(node).values()
    weights = next((one for one in seen_through(transposed) if are_transposed(one, transposed, 1, 2)), None)
    _need(weights is not None)
    assert weights is not None
    found.shared += views_between(transposed, weights)
    return weights, rows, ends


_GROUPED_PRODUCTS = ("aten._grouped_mm", "transformers.grouped_mm_fallback")


def _counted(found: _Experts, ends: fx.Node, experts: int) -> fx.Node:
    """ids of ``ends = cumsum(how often each expert is in ids)``."""
    counts = found.take(ends, _aten.cumsum.default)["self"]
    given = found.take(counts, _aten.histc.default)
    _need((given["bins"], given["min"], given["max"]) == (experts, 0, experts - 1))
    return found.take(given["self"], *CASTS)["self"]


def _output(found: _Experts, total: fx.Node) -> fx.Node:
    """The sum, or its cast to the input's dtype: weights of a wider one make the sum wider."""
    dtype = shown(found.given["hidden_states"]).dtype
    if shown(total).dtype is dtype:
        return total
    cast = only_user(total)
    if cast is None or not calls(cast, *CASTS) or shown(cast).dtype is not dtype:
        raise _Unlike
    return cast


def _fits(given: dict[str, fx.Node], pairs: torch.Tensor) -> bool:
    """Shapes and dtypes as the op takes them."""
    x, gate_up, down, weights, ids = (
        shown(given[name]) for name in ("hidden_states", "gate_up", "down", "weights", "ids")
    )
    return (
        x.dim() == 2
        and gate_up.dim() == down.dim() == 3
        and x.dtype in _FLOATS
        and x.dtype is gate_up.dtype is down.dtype
        and weights.dtype in _FLOATS
        and same_sizes(weights.shape, ids.shape)
        and same_sizes(pairs.shape, (*ids.shape, x.shape[1]))
        and same_size(x.shape[0], ids.shape[0])
        and isinstance(ids.shape[1], int)
    )


def _take_renormalisation(found: _Experts) -> None:
    """Let the op divide the weights by their sum, where nothing else uses the quotient."""
    division = found.given["weights"]
    if not calls(division, _aten.div.Tensor) or not all(user in found.inside for user in division.users):
        return
    weights, divisor = division.args
    if not calls(divisor, _aten.sum.dim_IntList) or divisor.args != (weights, [-1], True):
        return
    if only_user(divisor) is division and isinstance(weights, fx.Node):
        found.inside += [division, divisor]
        found.given["weights"], found.renormalize = weights, True


def _build_experts(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    given = (*match.inputs, match.values["topk"], match.values["renormalize"])
    return [call_like(rewriter, match.outputs[0], place, ops.fused_moe.overload, *given)]


MOE_EXPERTS = FusionRule(
    name="moe_experts",
    why="One call a block that reads each chosen expert's weights in place, once for all of its tokens.",
    anchors=(_aten.sum.dim_IntList,),
    match=_match_experts,
    build=_build_experts,
)
