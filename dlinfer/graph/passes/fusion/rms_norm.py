"""RMSNorm as model code writes it -> ``dlinfer.rms_norm``.

The core is x * rsqrt(mean(x^2) + eps) in any spelling. Below it models differ in where they round:

    Llama, Qwen, T5     weight * core.to(x.dtype)            rms_norm(x, weight), which rounds there too
    OLMo2, GPT-OSS      (weight * core).to(x.dtype)          rms_norm(x.float(), weight.float()).to(x.dtype)
    Gemma               (core * (1 + weight.float())) cast   the same, with 1 + weight as the model computes it
    Llama4's L2 norm    core.to(x.dtype)                     rms_norm(x, ones)

So the weight is taken in only where the op rounds as the model does; otherwise the op stops at the core, with a
weight of ones. A result is never rounded more often than the model rounds it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import arguments, fake
from dlinfer.graph.passes.fusion.layout import cast, contiguous_after, swapped
from dlinfer.graph.passes.fusion.match import (
    ADD,
    aten,
    calls,
    cast_source,
    dtype_of,
    is_last_dim,
    is_number,
    is_square,
    is_tensor,
    only_user,
    operands,
    rank_of,
    same_shape,
    same_size,
    scalar_operand,
    widened_from,
)
from dlinfer.graph.passes.fusion.rule import FusionRule, Match
from dlinfer.graph.passes.rewriter import Rewriter

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class _Core:
    """x * rsqrt(mean(x^2) + eps). source: x before casts; wide: x in the dtype of ``node``, where it exists."""

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


# --- the core


def _core(node: fx.Node) -> _Core | None:
    for wide, root, nodes in _quotients(node):
        statistic = _mean_square(root)
        if statistic is None:
            continue
        squared, eps, below = statistic
        source, casts = widened_from(wide)
        other, other_casts = widened_from(squared)
        if source is not other or dtype_of(node) not in _FLOATS or not same_shape(node, source):
            continue
        candidates = (one for one in (wide, squared) if dtype_of(one) is dtype_of(node))
        return _Core(
            node, source, next(candidates, source), eps, (*nodes, root, *below), (*casts, *other_casts)
        )
    return None


def _quotients(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, tuple[fx.Node, ...]]]:
    """(x, v, nodes between) for each way to read a node as x / sqrt(v)."""
    for x, scale in operands(node, aten.mul.Tensor):
        if is_tensor(x) and is_tensor(scale):
            # The factor may be cast down before it is used: our op, which keeps it in float32, is closer then.
            factor = cast_source(scale) or scale
            between = (scale,) if factor is not scale else ()
            root = _inverse_root(factor)
            if root is not None:
                yield x, root[0], (*between, *root[1])
    if calls(node, aten.div.Tensor) and not node.kwargs and all(map(is_tensor, node.args)):
        x, divisor = node.args
        under = _root(divisor)
        if under is not None:
            yield x, under, (divisor,)  # pyright: ignore[reportReturnType]


def _root(node: object) -> fx.Node | None:
    """v, when ``node`` is its square root."""
    if calls(node, aten.sqrt.default) or (calls(node, aten.pow.Tensor_Scalar) and node.args[1] == 0.5):
        return node.args[0]  # pyright: ignore[reportReturnType]
    return None


def _inverse_root(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """(v, nodes), when ``node`` is 1 / sqrt(v)."""
    if calls(node, aten.rsqrt.default) or (calls(node, aten.pow.Tensor_Scalar) and node.args[1] == -0.5):
        return node.args[0], (node,)  # pyright: ignore[reportReturnType]
    times_one = scalar_operand(node, aten.mul.Tensor)  # how Python writes 1.0 / tensor
    inverse = times_one[0] if times_one is not None and times_one[1] == 1 else node
    if calls(inverse, aten.reciprocal.default):
        under = _root(inverse.args[0])
        if under is not None:
            nodes = (node, inverse, inverse.args[0])
            return under, tuple(dict.fromkeys(nodes))  # pyright: ignore[reportReturnType]
    return None


def _mean_square(node: fx.Node) -> tuple[fx.Node, float, tuple[fx.Node, ...]] | None:
    """(x, eps, nodes), when ``node`` is the mean of x^2 over the last dimension plus eps."""
    addition = scalar_operand(node, *ADD)
    if addition is None or addition[1] <= 0:
        return None
    mean, eps = addition
    if not calls(mean, aten.mean.dim) or mean.kwargs.get("dtype") not in (None, dtype_of(mean)):
        return None
    square, dim, keepdim = (*mean.args, False)[:3] if len(mean.args) > 1 else (None, None, False)
    if not is_tensor(square) or keepdim is not True or not is_last_dim(dim, rank_of(square)):
        return None
    squared = is_square(square)
    if squared is None or dtype_of(square) is not dtype_of(mean) or dtype_of(squared) is not dtype_of(square):
        return None
    return squared, float(eps), (mean, square)


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
    for one, other in operands(product, aten.mul.Tensor):
        if one is not value or other is value or not is_tensor(other) or rank_of(other) != 1:
            continue
        if fake(other).is_floating_point() and same_size(fake(other).shape[0], fake(value).shape[-1]):
            return other
    return None


def _output(
    core: _Core, output: fx.Node, x: fx.Node, weight: fx.Node | None, inside: tuple[fx.Node, ...] = ()
) -> Match | None:
    found, swap = contiguous_after(fake(output))
    size = fake(x).shape[-1]
    if not found or (weight is None and not isinstance(size, int)):
        return None
    inputs = (x,) if weight is None else (x, weight)
    # Nodes that only make x wide stay when x is read through them or somebody else does.
    shared = tuple(node for node in dict.fromkeys(core.casts) if node is not x)
    values = {"eps": core.eps, "dtype": dtype_of(output), "swap": swap}
    return Match((output,), (*core.interior, *inside), inputs, values, shared)


def _match_single_node(node: fx.Node) -> Match | None:
    """``torch.nn.functional.rms_norm``: computed and weighted in float32, rounded once."""
    given = arguments(node)
    x, shape, weight, eps = (given[name] for name in ("input", "normalized_shape", "weight", "eps"))
    if not is_tensor(x) or dtype_of(x) not in _FLOATS:
        return None
    if len(shape) != 1 or not same_size(shape[0], fake(x).shape[-1]):
        return None
    wide = torch.promote_types(dtype_of(x), torch.float32)
    eps = torch.finfo(wide).eps if eps is None else eps
    if not is_number(eps) or eps <= 0 or (weight is None and not isinstance(fake(x).shape[-1], int)):
        return None
    found, swap = contiguous_after(fake(node))
    if not found:
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
        size, device = fake(x).shape[-1], fake(x).device
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
