"""A residual sum and the RMSNorm of it -> ``dlinfer.add_rms_norm``. Runs after the rule for RMSNorm."""

import operator
from collections.abc import Sequence

from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.passes.fusion.match import aten, dtype_of, is_tensor, operands, same_shape
from dlinfer.graph.passes.fusion.rule import FusionRule, Match
from dlinfer.graph.passes.rewriter import Rewriter


def _match(anchor: fx.Node) -> Match | None:
    total, weight, eps = anchor.args
    if not is_tensor(total) or not is_tensor(weight):
        return None
    x, residual = next(operands(total, aten.add.Tensor), (None, None))
    if not is_tensor(x) or not is_tensor(residual) or len(total.users) < 2:
        return None  # without a second reader of the sum there is nothing to share
    if any(dtype_of(term) is not dtype_of(total) or not same_shape(term, total) for term in (x, residual)):
        return None
    if any(fake(term).device != fake(total).device for term in (x, residual)) or not is_contiguous(
        fake(total)
    ):
        return None
    return Match((total, anchor), (), (x, residual, weight), {"eps": eps})


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
