"""Nodes that stay with torch, because ONNX Runtime's kernel or the translation to ONNX gives other results than torch.

Tests found these ops. Each test ran an op on numbers of all magnitudes, zeros of both signs, NaN and infinities.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from dlinfer.graph.ir.dialect import arguments, fake, op_name, overload


def _any(node: fx.Node) -> bool:
    return True


def _floats(node: fx.Node) -> bool:
    """Return whether a node has a float operand or a float result. An op of integers may have a float result."""
    return any(value.is_floating_point() for value in (*_operands(node), *pytree.tree_leaves(fake(node))))


def _integers(node: fx.Node) -> bool:
    return not any(value.is_floating_point() for value in _operands(node))


def _counted(node: fx.Node) -> bool:
    operands = _operands(node)
    return _integers(node) and not (operands and operands[0].dtype is torch.bool)


def _half(node: fx.Node) -> bool:
    return any(value.dtype is torch.float16 for value in _operands(node))


def _doubles(node: fx.Node) -> bool:
    every = (*_operands(node), *pytree.tree_leaves(fake(node)))
    return any(isinstance(value, Tensor) and value.dtype is torch.float64 for value in every)


def _fewer(node: fx.Node) -> bool:
    return len(fake(node)) != arguments(node)["chunks"]


def _operands(node: fx.Node) -> list[Tensor]:
    return [value for value in map(fake, node.all_input_nodes) if isinstance(value, Tensor)]


def _may_keep_a_size(node: fx.Node) -> bool:
    """Return whether a node that resizes by scale factors may leave a size as it is though its factor is not 1.

    An example is size 3 with factor 1.1: the new size 3.3 is rounded down to 3.
    """
    factors = [
        leaf
        for name, value in arguments(node).items()
        if name.startswith("scale")
        for leaf in pytree.tree_leaves(value)
    ]
    (before, *_), after = _operands(node), fake(node)
    sizes = zip(before.shape[2:], after.shape[2:], factors, strict=False)
    return any(map(_may_stay, *zip(*sizes, strict=True)))


def _may_stay(before: Any, after: Any, factor: Any) -> bool:
    if factor in (None, 1):
        return False
    if not isinstance(factor, (int, float)):
        return True
    if isinstance(before, int) and isinstance(after, int):
        return before == after
    return 1 < factor < 2  # other factors change each size


class _Rule(NamedTuple):
    """A kind of node that stays with torch.

    ops: names of aten ops, separated by spaces. reason: completes the sentence "ONNX Runtime's <op> ...".
    of: a condition on the node. when: a condition on the node's arguments by name. The rule needs both to be true.
    """

    ops: str
    reason: str
    of: Callable[[fx.Node], bool] = _any
    when: Callable[[Mapping[str, Any]], bool] = lambda call: True


_SHORT = "is translated to float32, which is not precise enough for float64"
_RULES = (
    _Rule(
        "erfc special_erfc expm1 special_expm1 log1p special_log1p elu celu selu log_sigmoid"
        " log_sigmoid_forward",
        "loses digits where numbers nearly cancel",
    ),
    _Rule("logaddexp", "overflows where the result does not"),
    _Rule("atan2 arctan2", "returns another quadrant for zeros, and 0 for NaN"),
    _Rule("xlogy special_xlogy", "returns 0 for 0 times the logarithm of NaN", _floats),
    _Rule("signbit", "treats -0.0 as positive"),
    _Rule("diagonal", "multiplies by zeros, which makes NaN of infinities"),
    _Rule("var_mean std_mean", "returns an infinity where the mean is NaN"),
    _Rule(
        "floor_divide remainder fmod",
        "confuses NaN with quotients of infinities",
        _floats,
    ),
    _Rule(
        "div",
        "rounds quotients with infinities differently",
        _floats,
        lambda call: call.get("rounding_mode") is not None,
    ),
    _Rule(
        "chunk unsafe_chunk", "needs as many parts as the call asks for, but torch may return fewer", _fewer
    ),
    _Rule("scatter_reduce", "ignores NaN", _floats, lambda call: call["reduce"] in ("amax", "amin")),
    _Rule("index_add scatter_add scatter_reduce", "has no kernel for float16", _half),
    _Rule("index_put", "has no kernel for float16", _half, lambda call: bool(call.get("accumulate"))),
    _Rule(
        "deg2rad rad2deg log2 log10 sinc special_sinc gelu pow full full_like new_full addcmul addmm baddbmm"
        " masked_fill layer_norm native_layer_norm scaled_dot_product_attention",
        _SHORT,
        _doubles,
    ),
    _Rule("log_softmax _log_softmax", "ignores NaN in float64", _doubles),
    _Rule("add sub rsub", _SHORT, _doubles, lambda call: call.get("alpha", 1) != 1),
    _Rule(
        "amax amin max min aminmax argmax argmin topk clamp clamp_min clamp_max",
        "ignores NaN in float64, where dlinfer has no translation of its own",
        _doubles,
    ),
    _Rule(
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d"
        " upsample_bicubic2d upsample_trilinear3d",
        "differs from torch along dimensions that keep their size",
        _may_keep_a_size,
    ),
    _Rule("prod", "computes integers as floats", _counted),
    _Rule("nansum", "computes integers as floats", _integers),
    _Rule(
        "pow",
        "overflows for negative exponents",
        _integers,
        lambda call: isinstance(call["exponent"], fx.Node),
    ),
    _Rule(
        "pow",
        "returns other roots of -0.0 and negative infinity than torch",
        _floats,
        lambda call: call.get("exponent") in (0.5, -0.5),
    ),
)


def refusal(node: fx.Node) -> str | None:
    """Return a reason not to run a node in ONNX Runtime, if the results would differ from torch's; else None."""
    op = overload(node)
    if op is None or op.namespace != "aten":
        return None
    name, call = op._schema.name.removeprefix("aten::").rstrip("_"), arguments(node)
    for rule in _RULES:
        if name in rule.ops.split() and rule.of(node) and rule.when(call):
            return f"ONNX Runtime's {op_name(node)} {rule.reason}"
    return None
