"""Ops whose kernel in ONNX Runtime, or whose translation, gives other numbers than torch's: torch keeps them.

Each was found by running it on numbers of all sizes, zeros of both signs, NaN and infinities.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from dlinfer.graph.ir.dialect import arguments, fake, op_name, overload

Rule = Callable[[fx.Node, Mapping[str, Any]], bool]
"""Whether something is said of a node with these arguments."""


def _always(node: fx.Node, given: Mapping[str, Any]) -> bool:
    return True


def _floats(node: fx.Node, given: Mapping[str, Any]) -> bool:
    return any(value.is_floating_point() for value in _operands(node))


def _doubles(node: fx.Node, given: Mapping[str, Any]) -> bool:
    every = (*_operands(node), *pytree.tree_leaves(fake(node)))
    return any(isinstance(value, Tensor) and value.dtype is torch.float64 for value in every)


def _scaled_doubles(node: fx.Node, given: Mapping[str, Any]) -> bool:
    return _doubles(node, given) and given.get("alpha", 1) != 1


def _integers(node: fx.Node, given: Mapping[str, Any]) -> bool:
    return not _floats(node, given)


def _half(node: fx.Node, given: Mapping[str, Any]) -> bool:
    return any(value.dtype is torch.float16 for value in _operands(node))


def _halves_added(node: fx.Node, given: Mapping[str, Any]) -> bool:
    return bool(given.get("accumulate")) and _half(node, given)


def _rounded(node: fx.Node, given: Mapping[str, Any]) -> bool:
    return _floats(node, given) and given.get("rounding_mode") is not None


def _fewer(node: fx.Node, given: Mapping[str, Any]) -> bool:
    return len(fake(node)) != given["chunks"]


def _extreme(node: fx.Node, given: Mapping[str, Any]) -> bool:
    return _floats(node, given) and given["reduce"] in ("amax", "amin")


def _varying_power(node: fx.Node, given: Mapping[str, Any]) -> bool:
    return _integers(node, given) and isinstance(given["exponent"], fx.Node)


def _root(node: fx.Node, given: Mapping[str, Any]) -> bool:
    return _floats(node, given) and given.get("exponent") in (0.5, -0.5)


def _counted(node: fx.Node, given: Mapping[str, Any]) -> bool:
    operands = _operands(node)
    return _integers(node, given) and not (operands and operands[0].dtype is torch.bool)


def _operands(node: fx.Node) -> list[Tensor]:
    return [value for value in map(fake, node.all_input_nodes) if isinstance(value, Tensor)]


_SHORT = "is translated with numbers of float32, which are too short for float64"
_RULES: tuple[tuple[str, Rule, str], ...] = (
    (
        "erfc special_erfc expm1 special_expm1 log1p special_log1p elu celu selu log_sigmoid",
        _always,
        "loses digits where numbers nearly cancel",
    ),
    ("logaddexp", _always, "overflows where the result does not"),
    ("atan2 arctan2", _always, "takes another quadrant for zeros, and 0 for NaN"),
    ("signbit", _always, "takes -0.0 for a positive number"),
    ("diagonal", _always, "multiplies by zeros, which infinities do not come through"),
    ("var_mean std_mean", _always, "gives an infinity where the mean is NaN"),
    ("floor_divide remainder fmod", _floats, "takes quotients of infinities for NaN, or the other way round"),
    ("div", _rounded, "rounds quotients otherwise where infinities are among them"),
    ("chunk unsafe_chunk", _fewer, "wants as many parts as are asked for, where torch gives fewer"),
    ("scatter_reduce", _extreme, "passes over NaN"),
    ("index_add scatter_add scatter_reduce", _half, "has no kernel for float16"),
    ("index_put", _halves_added, "has no kernel for float16"),
    (
        "deg2rad rad2deg log2 log10 sinc special_sinc gelu pow full full_like new_full addcmul addmm baddbmm"
        " masked_fill layer_norm native_layer_norm scaled_dot_product_attention",
        _doubles,
        _SHORT,
    ),
    ("add sub rsub", _scaled_doubles, _SHORT),
    (
        "amax amin max min aminmax argmax argmin topk clamp clamp_min clamp_max",
        _doubles,
        "passes over NaN in float64, which the translations of extremes are not written for",
    ),
    ("log_softmax _log_softmax", _doubles, "passes over NaN in float64"),
    ("prod", _counted, "goes through floats"),
    ("nansum", _integers, "goes through floats"),
    ("pow", _varying_power, "overflows for negative exponents"),
    ("pow", _root, "takes no root of -0.0 and of negative infinity as torch does"),
)
"""(ops of aten, the rule, what is different)."""

_TABLE: dict[str, list[tuple[Rule, str]]] = {}
for _names, _rule, _reason in _RULES:
    for _name in _names.split():
        _TABLE.setdefault(_name, []).append((_rule, _reason))


def refusal(node: fx.Node) -> str | None:
    """Why a node is left to torch; None where it is not."""
    op = overload(node)
    if op is None or op.namespace != "aten":
        return None
    given = arguments(node)
    for rule, reason in _TABLE.get(op._schema.name.removeprefix("aten::").rstrip("_"), ()):
        if rule(node, given):
            return f"ONNX Runtime's {op_name(node)} {reason}"
    return None
