"""Doubtful nodes: for some values of their operands, ONNX Runtime's kernels compute wrong results.

The model gets one more output, which says whether a call has such values. If a call has them, torch runs the call under
the fallback policy. There are two kinds of such values.

Float operands may have NaN. torch treats NaN as the largest value, but ONNX Runtime's sorts, maxima, minima and clamps
on one side ignore NaN. The translations in ``extremes`` handle NaN, so their nodes are not doubtful.

int64 operands may have more than 32 bits. ONNX Runtime computes some ops of int64 in floats: sorts, maxima, minima,
clamps, sums and remainders.
"""

from functools import reduce

import torch
from torch import Tensor, fx

from dlinfer.graph.ir.dialect import fake, overload
from dlinfer.graph.onnx.torch_semantics import insert_call
from dlinfer.vendor.onnxruntime.translations import extremes

_aten = torch.ops.aten

REASON = "it orders, sums or divides numbers with a NaN, or an int64 of more than 32 bits"
_LARGE = 2**31 - 1
_ORDERS = frozenset(
    f"aten::{name}"
    for name in """amax amin max min aminmax argmax argmin argsort topk sort median cummax cummin kthvalue
    clamp_min clamp_max""".split()
)
_OF_INT64 = frozenset(
    f"aten::{name}" for name in "maximum minimum fmax fmin clamp clip hardtanh relu6 sum fmod".split()
)


def note_doubts(graph: fx.Graph) -> bool:
    """Add a bool output to a graph that has doubtful nodes. Return whether the graph has any.

    The output is a scalar tensor. It is true if a call has values that ONNX Runtime would compute wrongly. The graph is
    changed in place; its output must be a list.
    """
    doubtful = {
        operand: None
        for node in graph.nodes
        for operand in node.all_input_nodes
        if isinstance(fake(operand), Tensor) and _is_doubtful(fake(operand), node)
    }
    if not doubtful:
        return False
    output = graph.output_node()
    doubts = [_has_doubts(output, operand) for operand in doubtful]
    doubt = reduce(lambda first, second: insert_call(output, _aten.logical_or.default, first, second), doubts)
    output.args = ((*output.args[0], doubt),)  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
    return True


def _is_doubtful(value: Tensor, node: fx.Node) -> bool:
    op = overload(node)
    if op is None or op._schema.name not in _ORDERS | _OF_INT64:
        return False
    if value.is_floating_point():
        return op._schema.name in _ORDERS and op not in extremes.TABLE
    return value.dtype is torch.int64


def _has_doubts(output: fx.Node, x: fx.Node) -> fx.Node:
    """Insert nodes before ``output`` that compute whether ``x`` has a NaN or, for int64, an element beyond 32 bits."""
    if fake(x).is_floating_point():
        bad = insert_call(output, _aten.isnan.default, x)
    else:
        high = insert_call(output, _aten.gt.Scalar, x, _LARGE)
        low = insert_call(output, _aten.lt.Scalar, x, -_LARGE)
        bad = insert_call(output, _aten.logical_or.default, high, low)
    return insert_call(output, _aten.any.default, bad)
