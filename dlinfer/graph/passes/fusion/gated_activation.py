"""silu(gate) * up and gelu(gate) * up, of two tensors or of the two halves of one."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import fx
from torch._ops import OpOverload

from dlinfer import ops
from dlinfer.graph.ir.dialect import arguments
from dlinfer.graph.ir.layout import is_contiguous, same_sizes
from dlinfer.graph.passes.fusion.match import calls, operands
from dlinfer.graph.passes.fusion.replacement import call_like
from dlinfer.graph.passes.fusion.rule import FusionRule, Match
from dlinfer.graph.passes.fusion.views import halves, shown, tensor, views_between
from dlinfer.graph.passes.rewriter import Rewriter

_aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # what the ops take


def _gated(mul: fx.Node, activation: OpOverload) -> tuple[fx.Node, fx.Node] | None:
    """The activation and the up of a product of ``activation(gate)`` and up, of one shape and dtype."""
    for gated, up in operands(mul, _aten.mul.Tensor):
        if calls(gated, activation) and _alike(gated, up) and is_contiguous(shown(mul)):
            return gated, up
    return None


def _alike(gated: fx.Node, up: object) -> TypeGuard[fx.Node]:
    one, other = tensor(gated), tensor(up)
    return (
        one is not None
        and other is not None
        and one.dtype in _FLOATS
        and one.dtype is other.dtype
        and one.device == other.device
        and same_sizes(one.shape, other.shape)
    )


def _match_silu(mul: fx.Node) -> Match | None:
    found = _gated(mul, _aten.silu.default)
    if found is None:
        return None
    silu, up = found
    gate = silu.args[0]
    assert isinstance(gate, fx.Node)
    whole = halves(gate, up)
    if whole is None:
        return Match(outputs=(mul,), interior=(silu,), inputs=(gate, up))
    views = (*views_between(gate, whole), *views_between(up, whole))
    return Match(outputs=(mul,), interior=(silu,), inputs=(whole,), shared=views)


def _build_silu(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    op = ops.silu_and_mul.overload if len(match.inputs) == 1 else ops.silu_mul.overload
    return [call_like(rewriter, match.outputs[0], place, op, *match.inputs)]


def _match_gelu(mul: fx.Node) -> Match | None:
    found = _gated(mul, _aten.gelu.default)
    if found is None:
        return None
    gelu, up = found
    given = arguments(gelu)
    tanh = given["approximate"] == "tanh"
    return Match(outputs=(mul,), interior=(gelu,), inputs=(given["self"], up), values={"tanh": tanh})


def _build_gelu(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    given = (*match.inputs, match.values["tanh"])
    return [call_like(rewriter, match.outputs[0], place, ops.gelu_mul.overload, *given)]


GATED_SILU = FusionRule(
    name="gated_silu",
    why="SwiGLU in one pass over gate and up, instead of writing and reading back silu(gate).",
    anchors=(_aten.mul.Tensor,),
    match=_match_silu,
    build=_build_silu,
)

GATED_GELU = FusionRule(
    name="gated_gelu",
    why="GeGLU in one pass over gate and up, instead of writing and reading back gelu(gate).",
    anchors=(_aten.mul.Tensor,),
    match=_match_gelu,
    build=_build_gelu,
)
