"""Fuse an RMSNorm, as model code writes it, into ``dlinfer.rms_norm``.

The core is x * rsqrt(mean(x^2) + eps) in any spelling. Models differ in the rounding after the core. The lines give the
models, their code after the core, and the replacement:

    Llama, Qwen, T5     weight * core.to(x.dtype)            rms_norm(x, weight), which rounds there too.
    OLMo2, GPT-OSS      (weight * core).to(x.dtype)          rms_norm(x.float(), weight.float()).to(x.dtype).
    Gemma               (core * (1 + weight.float())) cast   as OLMo2, with 1 + weight as the model computes it.
    Llama4's L2 norm    core.to(x.dtype)                     rms_norm(x, ones).

The rule passes the model's weight to the op only if the op rounds as the model does. Otherwise the op replaces the core
alone, with a weight of ones. A result is never rounded more often than the model rounds it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import arguments, tensor_of
from dlinfer.graph.ir.layout import is_static, same_size
from dlinfer.graph.passes.fusion.layout import Swap, cast, contiguous_after, swapped
from dlinfer.graph.passes.fusion.match import (
    ADD,
    FLOATS,
    aten,
    calls,
    cast_source,
    dtype_of,
    is_number,
    is_tensor,
    only_user,
    same_shape,
    widened_from,
)
from dlinfer.graph.passes.fusion.pattern import any_of, both, call, matches, number, through_casts
from dlinfer.graph.passes.fusion.rule import Match, fusion_rule
from dlinfer.graph.passes.rewriter import Rewriter

_SQUARE = any_of(
    call(aten.pow.Tensor_Scalar, "squared", 2),
    call(aten.square.default, "squared"),
    call(aten.mul.Tensor, "squared", "squared"),
)
_MEAN = both("mean", call(aten.mean.dim, _SQUARE, [-1], True, dtype=...))
_VARIANCE = call(ADD, _MEAN, number("eps"))
_ROOT = any_of(call(aten.sqrt.default, _VARIANCE), call(aten.pow.Tensor_Scalar, _VARIANCE, 0.5))
_RECIPROCAL = call(aten.reciprocal.default, _ROOT)
_INVERSE_ROOT = any_of(
    call(aten.rsqrt.default, _VARIANCE),
    call(aten.pow.Tensor_Scalar, _VARIANCE, -0.5),
    _RECIPROCAL,
    call(aten.mul.Tensor, _RECIPROCAL, 1),  # how Python writes 1.0 / tensor
)
# The model may cast the factor down before it is used. The op keeps it in float32, which is more precise.
_CORE = any_of(
    call(aten.mul.Tensor, through_casts(_INVERSE_ROOT), "wide"), call(aten.div.Tensor, "wide", _ROOT)
)


@dataclass(frozen=True)
class _Core:
    """A match of x * rsqrt(mean(x^2) + eps), computed by ``node``.

    source: x before casts.
    wide: x cast to the dtype of ``node``. If the graph has no such cast, this is ``source``.
    """

    node: fx.Node
    source: fx.Node
    wide: fx.Node
    eps: float
    interior: tuple[fx.Node, ...]
    casts: tuple[fx.Node, ...]

    def replaced(self, output: fx.Node, x: fx.Node, weight: fx.Node | None, *inside: fx.Node) -> Match | None:
        """Return the match that ends in ``output``. inside: the nodes from the core to ``output``."""
        dtype = dtype_of(output)
        return _norm(output, x, weight, self.eps, dtype, (*self.interior, *inside), self.casts)


def _match(anchor: fx.Node) -> Match | None:
    if calls(anchor, aten.rms_norm.default):
        return _match_single_node(anchor)
    core = _core(anchor)
    if core is None:
        return None
    return _rounded_before_weight(core) or _weighted(core) or core.replaced(core.node, core.wide, None)


def _core(node: fx.Node) -> _Core | None:
    for bound in matches(_CORE, node):
        wide, squared = bound["wide"], bound["squared"]
        source, casts = widened_from(wide)
        other, other_casts = widened_from(squared)
        if source is not other or dtype_of(node) not in FLOATS or not same_shape(node, source):
            continue
        if bound.numbers["eps"] <= 0 or dtype_of(squared) is not dtype_of(bound["mean"]):
            continue
        x = next((x for x in (wide, squared) if dtype_of(x) is dtype_of(node)), source)
        return _Core(node, source, x, bound.numbers["eps"], bound.interior, (*casts, *other_casts))
    return None


def _rounded_before_weight(core: _Core) -> Match | None:
    """Match a core whose result is cast back to x's dtype. A product with a weight of this dtype may follow."""
    rounded, dtype = only_user(core.node), dtype_of(core.source)
    if rounded is None or cast_source(rounded) is not core.node or dtype_of(rounded) is not dtype:
        return None
    if dtype_of(core.node) is not torch.promote_types(dtype, torch.float32):
        return None
    product, weight = _weighted_by(rounded)
    if weight is None or dtype_of(weight) is not dtype:
        return core.replaced(rounded, core.source, None, core.node)
    return core.replaced(product, core.source, weight, core.node, rounded)


def _weighted(core: _Core) -> Match | None:
    """Match a core that is multiplied by a weight without a cast in between."""
    product, weight = _weighted_by(core.node)
    if weight is None or dtype_of(product) is not dtype_of(core.node):
        return None
    return core.replaced(product, core.wide, weight, core.node)


def _weighted_by(value: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the product of a node with a weight, and the weight. A weight is a vector over the last dimension.

    Return ``value`` and None if the node's only user is not such a product, or the node has several users.
    """
    for product in value.users if len(value.users) == 1 else ():
        for bound in matches(call(aten.mul.Tensor, "value", "weight"), product):
            vector = tensor_of(bound["weight"])
            if bound["value"] is not value or bound["weight"] is value or vector.dim() != 1:
                continue
            if vector.is_floating_point() and same_size(vector.shape[0], tensor_of(value).shape[-1]):
                return product, bound["weight"]
    return value, None


def _match_single_node(node: fx.Node) -> Match | None:
    """Match ``torch.nn.functional.rms_norm``, which computes in float32 with the weight, and rounds once."""
    by_name = arguments(node)
    x, shape, weight, eps = (by_name[name] for name in ("input", "normalized_shape", "weight", "eps"))
    if not is_tensor(x) or dtype_of(x) not in FLOATS:
        return None
    if len(shape) != 1 or not same_size(shape[0], tensor_of(x).shape[-1]):
        return None
    wide = torch.promote_types(dtype_of(x), torch.float32)
    eps = torch.finfo(wide).eps if eps is None else eps
    if not is_number(eps) or eps <= 0 or (weight is not None and dtype_of(weight) is not dtype_of(x)):
        return None
    return _norm(node, x, weight, float(eps), wide)


def _norm(
    output: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    eps: float,
    dtype: torch.dtype,
    interior: tuple[fx.Node, ...] = (),
    shared: Iterable[fx.Node] = (),
) -> Match | None:
    """Return the match of a norm that is computed in ``dtype``.

    Return None if the op cannot return the output's layout, or if a weight of ones would need a symbolic size.
    """
    is_fit, swap = contiguous_after(tensor_of(output))
    if not is_fit or (weight is None and not is_static(tensor_of(x).shape[-1])):
        return None
    inputs = (x,) if weight is None else (x, weight)
    return Match((output,), interior, inputs, partial(_build, eps=eps, dtype=dtype, swap=swap), shared)


def _build(
    rewriter: Rewriter, match: Match, place: fx.Node, *, eps: float, dtype: torch.dtype, swap: Swap
) -> Sequence[fx.Node]:
    x = swapped(rewriter, place, cast(rewriter, place, match.inputs[0], dtype), swap)
    if len(match.inputs) == 2:
        weight = cast(rewriter, place, match.inputs[1], dtype)
    else:
        size, device = tensor_of(x).shape[-1], tensor_of(x).device
        weight = rewriter.call(place, aten.ones.default, [size], dtype=dtype, device=device)
    normed = rewriter.call(place, ops.rms_norm.overload, x, weight, eps)
    normed = cast(rewriter, place, normed, dtype_of(match.outputs[0]))
    return [swapped(rewriter, place, normed, swap)]


RMS_NORM = fusion_rule(
    name="rms_norm",
    why="five to eight passes over the activations, four of them in float32, become one",
    anchors=(aten.mul.Tensor, aten.div.Tensor, aten.rms_norm.default),
    match=_match,
)
