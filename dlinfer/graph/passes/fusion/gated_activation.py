"""silu(gate) * up and gelu(gate) * up, of two tensors or of the two halves of one -> ``dlinfer`` ops."""

from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import arguments, tensor_of
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.passes.fusion.match import FLOATS, aten, dtype_of, same_shape
from dlinfer.graph.passes.fusion.pattern import Bindings, Pattern, both, call, matches
from dlinfer.graph.passes.fusion.rule import FusionRule, Match, replace_by
from dlinfer.graph.passes.fusion.views import halves, views_between

_SILU = call(aten.mul.Tensor, call(aten.silu.default, "gate"), "up")
_GELU = call(aten.mul.Tensor, both("gelu", call(aten.gelu.default, "gate", approximate=...)), "up")


def _gated(pattern: Pattern, product: fx.Node) -> Bindings | None:
    for bound in matches(pattern, product):
        gate, up = bound["gate"], bound["up"]
        is_alike = dtype_of(gate) is dtype_of(up) and same_shape(gate, up)
        if is_alike and dtype_of(gate) in FLOATS and tensor_of(gate).device == tensor_of(up).device:
            return bound if is_contiguous(tensor_of(product)) else None
    return None


def _match_silu(product: fx.Node) -> Match | None:
    bound = _gated(_SILU, product)
    if bound is None:
        return None
    gate, up = bound["gate"], bound["up"]
    whole = halves(gate, up)
    if whole is None:
        return Match((product,), bound.interior, (gate, up), {"op": ops.silu_mul.overload})
    views = (*views_between(gate, whole), *views_between(up, whole))
    return Match((product,), bound.interior, (whole,), {"op": ops.silu_and_mul.overload}, views)


def _match_gelu(product: fx.Node) -> Match | None:
    bound = _gated(_GELU, product)
    if bound is None:
        return None
    tanh = arguments(bound["gelu"])["approximate"] == "tanh"
    values = {"op": ops.gelu_mul.overload, "arguments": (tanh,)}
    return Match((product,), bound.interior, (bound["gate"], bound["up"]), values)


GATED_SILU = FusionRule(
    name="gated_silu",
    why="SwiGLU in one pass over gate and up, instead of writing and reading back silu(gate).",
    anchors=(aten.mul.Tensor,),
    match=_match_silu,
    build=replace_by,
)

GATED_GELU = FusionRule(
    name="gated_gelu",
    why="GeGLU in one pass over gate and up, instead of writing and reading back gelu(gate).",
    anchors=(aten.mul.Tensor,),
    match=_match_gelu,
    build=replace_by,
)
