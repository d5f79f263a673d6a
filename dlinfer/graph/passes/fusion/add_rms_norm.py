"""Fuse a residual sum and its RMSNorm into ``dlinfer.add_rms_norm``. The rule runs after the rule for RMSNorm."""

import operator
from collections.abc import Sequence

from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import tensor_of
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.passes.fusion.match import aten, same_kind, same_shape
from dlinfer.graph.passes.fusion.pattern import both, call, matches
from dlinfer.graph.passes.fusion.rule import Match, fusion_rule
from dlinfer.graph.passes.rewriter import Rewriter

_PATTERN = call(ops.rms_norm.overload, both("sum", call(aten.add.Tensor, "x", "residual")), "weight", ...)


def _match(norm: fx.Node) -> Match | None:
    bound = next(matches(_PATTERN, norm), None)
    if bound is None or len(bound["sum"].users) < 2:
        return None  # without a second reader of the sum there is nothing to share
    total, terms = bound["sum"], (bound["x"], bound["residual"])
    if not all(same_kind(term, total) and same_shape(term, total) for term in terms):
        return None
    if not is_contiguous(tensor_of(total)):
        return None
    return Match((total, norm), (), (*terms, bound["weight"]), _build)


def _build(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    _, norm = match.outputs
    both = rewriter.call(place, ops.add_rms_norm.overload, *match.inputs, norm.args[2])
    normed, total = (rewriter.call(place, operator.getitem, both, index) for index in range(2))
    return [total, normed]


ADD_RMS_NORM = fusion_rule(
    name="add_rms_norm",
    why="the norm reads the residual sum while the sum is still in registers",
    anchors=(ops.rms_norm.overload,),
    match=_match,
)
