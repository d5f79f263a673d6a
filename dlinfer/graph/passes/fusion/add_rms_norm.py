"""A residual sum and the RMSNorm of it -> ``dlinfer.add_rms_norm``. Runs after the rule for RMSNorm."""

import operator
from collections.abc import Sequence

from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import tensor_of
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.passes.fusion.match import aten, dtype_of, same_shape
from dlinfer.graph.passes.fusion.pattern import both, call, matches
from dlinfer.graph.passes.fusion.rule import FusionRule, Match
from dlinfer.graph.passes.rewriter import Rewriter

_PATTERN = call(ops.rms_norm.overload, both("sum", call(aten.add.Tensor, "x", "residual")), "weight", ...)


def _match(norm: fx.Node) -> Match | None:
    bound = next(matches(_PATTERN, norm), None)
    if bound is None or len(bound["sum"].users) < 2:
        return None  # without a second reader of the sum there is nothing to share
    total, terms = tensor_of(bound["sum"]), (bound["x"], bound["residual"])
    for term in terms:
        if dtype_of(term) is not total.dtype or not same_shape(term, bound["sum"]):
            return None
        if tensor_of(term).device != total.device:
            return None
    if not is_contiguous(total):
        return None
    return Match((bound["sum"], norm), (), (*terms, bound["weight"]), {"eps": norm.args[2]})


def _build(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    both = rewriter.call(place, ops.add_rms_norm.overload, *match.inputs, match.values["eps"])
    normed = rewriter.call(place, operator.getitem, both, 0)
    total = rewriter.call(place, operator.getitem, both, 1)
    return [total, normed]


ADD_RMS_NORM = FusionRule(
    name="add_rms_norm",
    why="the residual sum is read again by the norm while it is still in registers",
    anchors=(ops.rms_norm.overload,),
    match=_match,
    build=_build,
)
