"""What only a call's numbers tell: the model says whether any of them makes ONNX Runtime's kernels wrong.

Orders and bounds by one side pass over NaN, where torch takes it for the largest (``extremes`` are written so that
they do not); of int64 they, extremes, bounds, sums and quotients go through floats. One more result of the model says
whether a call has such numbers. Then torch runs the call, under the fallback policy.
"""

import torch
from torch import Tensor, fx

from dlinfer.graph.ir.dialect import fake, overload
from dlinfer.graph.torch_private.fake_mode import mode_of
from dlinfer.vendor.onnxruntime.translations import extremes

_aten = torch.ops.aten

REASON = "a NaN, or an int64 beyond 32 bits, among numbers that are ordered, summed or divided"
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
    """Give the graph one more output, a bool of no dimensions, where it has doubtful nodes; whether it has.

    Changes ``graph``, whose output is a list.
    """
    asked: dict[fx.Node, None] = {}
    for node in graph.nodes:
        op = overload(node)
        if op is None or op._schema.name not in _ORDERS | _OF_INT64:
            continue
        for operand in node.all_input_nodes:
            value = fake(operand)
            if isinstance(value, Tensor) and _doubtful(value, op):
                asked.setdefault(operand)
    if not asked:
        return False
    output = graph.output_node()
    with graph.inserting_before(output):
        parts = [_found(graph, operand) for operand in asked]
        found = parts[0]
        for part in parts[1:]:
            found = _call(graph, _aten.logical_or.default, found, part)
    output.args = ((*output.args[0], found),)  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
    return True


def _doubtful(value: Tensor, op: torch._ops.OpOverload) -> bool:
    if value.is_floating_point():
        return op._schema.name in _ORDERS and op not in extremes.TABLE
    return value.dtype is torch.int64


def _found(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Whether a tensor has any doubtful element."""
    if fake(x).is_floating_point():
        bad = _call(graph, _aten.isnan.default, x)
    else:
        high = _call(graph, _aten.gt.Scalar, x, _LARGE)
        bad = _call(graph, _aten.logical_or.default, high, _call(graph, _aten.lt.Scalar, x, -_LARGE))
    return _call(graph, _aten.any.default, bad)


def _call(graph: fx.Graph, op: torch._ops.OpOverload, *args: object) -> fx.Node:
    node = graph.call_function(op, args)  # pyright: ignore[reportArgumentType]
    values = [fake(one) if isinstance(one, fx.Node) else one for one in args]
    with mode_of([value for value in values if isinstance(value, Tensor)]):
        node.meta["val"] = op(*values)
    return node
