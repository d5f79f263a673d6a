"""Indices that the data holds: what torch raises for, a session raises for too.

ONNX counts negative indices from the end in every op, torch in some ops only. In front of the others a negative index
becomes one behind every end, which names no other element: ONNX Runtime's kernels raise for it before they write
anything. What a vendor's kernel does that does not look is not defined by ONNX.
"""

from collections.abc import Mapping

import torch
from torch import fx

from dlinfer.graph.ir.dialect import arguments, fake, overload
from dlinfer.graph.seam.fake_mode import mode_of

_aten = torch.ops.aten

BEHIND = 2**31 - 1
"""Behind the end of every dimension; fits int32."""

_FROM_THE_FRONT: Mapping[str, str] = {
    "aten::embedding": "indices",
    "aten::gather": "index",
    "aten::index_add": "index",
    "aten::index_copy": "index",
    "aten::index_select": "index",
    "aten::scatter": "index",
    "aten::scatter_add": "index",
    "aten::scatter_reduce": "index",
    "dlinfer::fused_moe": "topk_ids",
}
"""Ops of torch that raise for a negative index -> their parameter."""


def takes_indices(graph: fx.Graph) -> bool:
    """Whether ``refuse_negative`` would change a graph."""
    return any(op is not None and op._schema.name in _FROM_THE_FRONT for op in map(overload, graph.nodes))


def refuse_negative(graph: fx.Graph) -> None:
    """Put each negative index behind the end, where torch takes none. Changes ``graph``."""
    made: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        op = overload(node)
        name = _FROM_THE_FRONT.get(op._schema.name) if op is not None else None
        if name is None:
            continue
        index = arguments(node)[name]
        if index not in made:
            made[index] = _behind(graph, index)
        node.replace_input_with(index, made[index])


def _behind(graph: fx.Graph, index: fx.Node) -> fx.Node:
    after = index.next
    while after.op == "placeholder":
        after = after.next
    with graph.inserting_before(after):
        negative = graph.call_function(_aten.lt.Scalar, (index, 0))
        result = graph.call_function(_aten.masked_fill.Scalar, (index, negative, BEHIND))
    with mode_of([fake(index)]):
        negative.meta["val"] = fake(index) < 0
        result.meta["val"] = fake(index).masked_fill(fake(negative), BEHIND)
    return result
