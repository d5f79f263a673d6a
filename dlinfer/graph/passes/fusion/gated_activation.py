"""Fuse ``silu(gate) * up`` and ``gelu(gate) * up`` into ``dlinfer`` ops.

If gate and up are the two halves of one tensor, the rule for silu inserts ``silu_and_mul``, which reads the whole
tensor.
"""

from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import arguments, tensor_of
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.passes.fusion.match import FLOATS, aten, dtype_of, same_kind, same_shape
from dlinfer.graph.passes.fusion.pattern import Bindings, Pattern, both, call, matches
from dlinfer.graph.passes.fusion.rule import Match, by, fusion_rule
from dlinfer.graph.passes.fusion.views import halves, views_between

_SILU = call(aten.mul.Tensor, call(aten.silu.default, "gate"), "up")
_GELU = call(aten.mul.Tensor, both("gelu", call(aten.gelu.default, "gate", approximate=...)), "up")


def _gated(pattern: Pattern, product: fx.Node) -> Bindings | None:
    for bound in matches(pattern, product):
        gate, up = bound["gate"], bound["up"]
        if same_kind(gate, up) and same_shape(gate, up) and dtype_of(gate) in FLOATS:
            return bound if is_contiguous(tensor_of(product)) else None
    return None


def _match_silu(product: fx.Node) -> Match | None:
    bound = _gated(_SILU, product)
    if bound is None:
        return None
    gate, up = bound["gate"], bound["up"]
    whole = halves(gate, up)
    if whole is None:
        return Match((product,), bound.interior, (gate, up), by(ops.silu_mul.overload))
    views = (*views_between(gate, whole), *views_between(up, whole))
    return Match((product,), bound.interior, (whole,), by(ops.silu_and_mul.overload), views)


def _match_gelu(product: fx.Node) -> Match | None:
    bound = _gated(_GELU, product)
    if bound is None:
        return None
    tanh = arguments(bound["gelu"])["approximate"] == "tanh"
    build = by(ops.gelu_mul.overload, tanh)
    return Match((product,), bound.interior, (bound["gate"], bound["up"]), build)


GATED_SILU = fusion_rule(
    name="gated_silu",
    why="SwiGLU in one pass over gate and up, instead of writing and reading back silu(gate).",
    anchors=(aten.mul.Tensor,),
    match=_match_silu,
)

GATED_GELU = fusion_rule(
    name="gated_gelu",
    why="GeGLU in one pass over gate and up, instead of writing and reading back gelu(gate).",
    anchors=(aten.mul.Tensor,),
    match=_match_gelu,
)
