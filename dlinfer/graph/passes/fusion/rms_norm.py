"""RMSNorm as model code writes it -> ``dlinfer.rms_norm``.

The core is x * rsqrt(mean(x^2) + eps) in any spelling. Below it models differ in where they round:

    Llama, Qwen, T5     weight * core.to(x.dtype)            rms_norm(x, weight), which rounds there too.
    OLMo2, GPT-OSS      (weight * core).to(x.dtype)          rms_norm(x.float(), weight.float()).to(x.dtype).
    Gemma               (core * (1 + weight.float())) cast   the same, with 1 + weight as the model computes it.
    Llama4's L2 norm    core.to(x.dtype)                     rms_norm(x, ones).

The rule takes the weight in only where the op rounds as the model does. Otherwise it replaces the core alone, with a
weight of ones. A result is never rounded more often than the model rounds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import arguments, tensor_of
from dlinfer.graph.ir.layout import same_size
from dlinfer.graph.passes.fusion.layout import cast, contiguous_after, swapped
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
from dlinfer.graph.passes.fusion.rule import FusionRule, Match
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
# The factor may be cast down before it is used: the op, which keeps it in float32, is closer then.
_CORE = any_of(
    call(aten.mul.Tensor, through_casts(_INVERSE_ROOT), "wide"), call(aten.div.Tensor, "wide", _ROOT)
)


@dataclass(frozen=True)
class _Core:
    """x * rsqrt(mean(x^2) + eps). source: x before casts. wide: x in the dtype of ``node``, where that exists."""

    node: fx.Node
    source: fx.Node
    wide: fx.Node
    eps: float
    interior: tuple[fx.Node, ...]
    casts: tuple[fx.Node, ...]


def _match(anchor: fx.Node) -> Match | None:
    if calls(anchor, aten.rms_norm.default):
        return _match_single_node(anchor)
    core = _core(anchor)
    if core is None:
        return None
    return _rounded_before_weight(core) or _weighted(core) or _output(core, core.node, core.wide, None)


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


# --- what stands below it


def _rounded_before_weight(core: _Core) -> Match | None:
    """The core is cast back to x's dtype; a weight of that dtype may follow."""
    rounded = only_user(core.node)
    dtype = dtype_of(core.source)
    if rounded is None or cast_source(rounded) is not core.node or dtype_of(rounded) is not dtype:
        return None
    if dtype_of(core.node) is not torch.promote_types(dtype, torch.float32):
        return None
    inside = (core.node, rounded)
    product = only_user(rounded)
    weight = _weight(product, rounded)
    if product is not None and weight is not None and dtype_of(weight) is dtype:
        return _output(core, product, core.source, weight, inside)
    return _output(core, rounded, core.source, None, (core.node,))


def _weighted(core: _Core) -> Match | None:
    """The core is multiplied by a weight as it is."""
    product = only_user(core.node)
    weight = _weight(product, core.node)
    if product is None or weight is None or dtype_of(product) is not dtype_of(core.node):
        return None
    return _output(core, product, core.wide, weight, (core.node,))


def _weight(product: fx.Node | None, value: fx.Node) -> fx.Node | None:
    """w, when ``product`` is ``value`` times a vector over the last dimension."""
    if product is None:
        return None
    for bound in matches(call(aten.mul.Tensor, "value", "weight"), product):
        weight = bound["weight"]
        vector = tensor_of(weight)
        if bound["value"] is not value or weight is value or vector.dim() != 1:
            continue
        if vector.is_floating_point() and same_size(vector.shape[0], tensor_of(value).shape[-1]):
            return weight
    return None


def _output(
    core: _Core, output: fx.Node, x: fx.Node, weight: fx.Node | None, inside: tuple[fx.Node, ...] = ()
) -> Match | None:
    bound, swap = contiguous_after(tensor_of(output))
    size = tensor_of(x).shape[-1]
    if not bound or (weight is None and not isinstance(size, int)):
        return None
    inputs = (x,) if weight is None else (x, weight)
    # A cast of x stays where the op reads it, or something else does.
    shared = tuple(node for node in dict.fromkeys(core.casts) if node is not x)
    values = {"eps": core.eps, "dtype": dtype_of(output), "swap": swap}
    return Match((output,), (*core.interior, *inside), inputs, values, shared)


def _match_single_node(node: fx.Node) -> Match | None:
    """``torch.nn.functional.rms_norm``: computed and weighted in float32, rounded once."""
    by_name = arguments(node)
    x, shape, weight, eps = (by_name[name] for name in ("input", "normalized_shape", "weight", "eps"))
    if not is_tensor(x) or dtype_of(x) not in FLOATS:
        return None
    if len(shape) != 1 or not same_size(shape[0], tensor_of(x).shape[-1]):
        return None
    wide = torch.promote_types(dtype_of(x), torch.float32)
    eps = torch.finfo(wide).eps if eps is None else eps
    if not is_number(eps) or eps <= 0 or (weight is None and not isinstance(tensor_of(x).shape[-1], int)):
        return None
    bound, swap = contiguous_after(tensor_of(node))
    if not bound:
        return None
    inputs = (x, weight) if is_tensor(weight) else (x,)
    if len(inputs) == 2 and dtype_of(inputs[1]) is not dtype_of(x):
        return None
    values = {"eps": float(eps), "dtype": wide, "swap": swap, "result": dtype_of(node)}
    return Match((node,), (), inputs, values)


# --- the replacement


def _build(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    dtype, swap = match.values["dtype"], match.values["swap"]
    x = swapped(rewriter, place, cast(rewriter, place, match.inputs[0], dtype), swap)
    if len(match.inputs) == 2:
        weight = cast(rewriter, place, match.inputs[1], dtype)
    else:
        size, device = tensor_of(x).shape[-1], tensor_of(x).device
        weight = rewriter.call(place, aten.ones.default, [size], dtype=dtype, device=device)
    normed = rewriter.call(place, ops.rms_norm.overload, x, weight, match.values["eps"])
    normed = cast(rewriter, place, normed, match.values.get("result", dtype))
    return [swapped(rewriter, place, normed, swap)]


RMS_NORM = FusionRule(
    name="rms_norm",
    why="five to eight passes over the activations, four of them in float32, become one",
    anchors=(aten.mul.Tensor, aten.div.Tensor, aten.rms_norm.default),
    match=_match,
    build=_build,
)
