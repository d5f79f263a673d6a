"""Refuse calls that lose precision in ONNX: float64 calls with float32 constants, and computed Python floats.

The exporter writes Python numbers as float32 unless a type requires more, and some translations always compute in
float32. A float that is computed from sizes has 64 bits in Python, and 32 bits in a model.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dlinfer.graph.ir.dialect import fake

if TYPE_CHECKING:
    import onnx_ir

_SHORT_BITS = 12
"""A number with more binary digits than this does not count as exact in float32."""


def python_float(node: fx.Node) -> str | None:
    """Return a reason not to export a node that computes a Python float; None for other nodes."""
    if node.op == "call_function" and isinstance(fake(node), (float, torch.SymFloat)):
        return "it computes a Python float of 64 bits, but an ONNX model has only 32 bits for it"
    return None


def short_numbers(node: fx.Node, model: "onnx_ir.Model") -> str | None:
    """Return a reason not to export a float64 call whose translation computes in float32; None for other calls.

    model: an ``onnx_ir.Model`` of this call alone.
    """
    values = [leaf for value in (node, *node.all_input_nodes) for leaf in pytree.tree_leaves(fake(value))]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    if torch.float64 not in dtypes:
        return None
    if any(isinstance(value, (float, torch.SymFloat)) for value in values):
        return "a Python float has only 32 bits in an ONNX model, too few for a float64 call"
    constants = list(_constants(model))
    arguments = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, float)]
    shortened = bool(constants) and not all(map(_is_short, (*constants, *arguments)))
    if shortened or _computes(model) or (torch.float32 not in dtypes and _narrows(model)):
        return "its translation uses float32, which is not precise enough for float64"
    return None


def _is_short(number: float) -> bool:
    if not math.isfinite(number):
        return True
    digits, _ = math.frexp(number)
    return (digits * 2**_SHORT_BITS).is_integer() and abs(number) < torch.finfo(torch.float32).max


def _nodes(model: "onnx_ir.Model") -> Iterator["onnx_ir.Node"]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _constants(model: "onnx_ir.Model") -> Iterator[float]:
    """Yield every float32 number in a model's nodes: constants, and attributes."""
    import onnx_ir

    for node in _nodes(model):
        for attribute in node.attributes.values():
            if attribute.value is None:  # a function's own, which its call carries
                continue
            if attribute.type is onnx_ir.AttributeType.FLOAT:
                yield attribute.value
            elif attribute.type is onnx_ir.AttributeType.FLOATS:
                yield from attribute.value
            elif (
                attribute.type is onnx_ir.AttributeType.TENSOR
                and attribute.value.dtype is onnx_ir.DataType.FLOAT
            ):
                yield from attribute.value.numpy().reshape(-1).tolist()


_MOVING = frozenset("Cast CastLike Concat Expand Identity Pow Reshape Squeeze Tile Unsqueeze".split())
"""ONNX ops that only move or cast a constant, and Pow, which uses its exponent exactly."""


def _computes(model: "onnx_ir.Model") -> bool:
    """Return whether an op of a model computes in float32 with a float32 constant."""
    import onnx_ir

    short: set[onnx_ir.Value] = set()
    for node in _nodes(model):
        if node.op_type == "Constant":
            (attribute,) = node.attributes.values()
            kind = getattr(attribute.value, "dtype", None)
            if attribute.name in ("value_float", "value_floats") or kind is onnx_ir.DataType.FLOAT:
                short.update(node.outputs)
        elif not short.isdisjoint(node.inputs):
            if node.op_type not in _MOVING:
                return True
            if node.op_type not in ("Cast", "CastLike", "Pow"):
                short.update(node.outputs)
    return False


def _narrows(model: "onnx_ir.Model") -> bool:
    casts = (node for node in _nodes(model) if node.op_type == "Cast")
    return any(node.attributes["to"].value == 1 for node in casts)
