"""Make ONNX raise for negative indices where torch does.

ONNX counts negative indices from the end in every op, torch in some ops only. Before the others a negative index is
replaced by one beyond every dimension, for which ONNX Runtime's kernels raise before they write.
"""

from collections.abc import Mapping

import torch
from torch import fx

from dlinfer.graph.ir.dialect import arguments, fake, overload
from dlinfer.graph.torch_private.dispatcher import OpOverload
from dlinfer.graph.torch_private.fake_mode import mode_of

_aten = torch.ops.aten

BEHIND = 2**31 - 1
"""Beyond the end of every dimension; fits int32."""

_FROM_THE_FRONT: Mapping[str, str] = {
    "aten::embedding": "indices",
    "aten::gather": "index",
    "aten::index_add": "index",
    "aten::index_copy": "index",
    "aten::index_select": "index",
    "aten::scatter": "index",
    "aten::scatter_add": "index",
    "aten::scatter_reduce": "index",
    "aten::cross_entropy_loss": "target",
    "aten::nll_loss": "target",
    "aten::nll_loss2d": "target",
    "aten::nll_loss_nd": "target",
    "aten::nll_loss_forward": "target",
    "aten::nll_loss2d_forward": "target",
    "dlinfer::fused_moe": "topk_ids",
}
"""Ops of torch that raise for a negative index -> their parameter. Ops with ``ignore_index`` take that number too."""


def takes_indices(graph: fx.Graph) -> bool:
    """Whether ``refuse_negative`` would change a graph."""
    return any(op is not None and op._schema.name in _FROM_THE_FRONT for op in map(overload, graph.nodes))


def refuse_negative(graph: fx.Graph) -> None:
    """Replace negative indices of ops that refuse them in torch. Changes ``graph``."""
    made: dict[tuple[fx.Node, int | None], fx.Node] = {}
    for node in list(graph.nodes):
        op = overload(node)
        name = _FROM_THE_FRONT.get(op._schema.name) if op is not None else None
        if name is None:
            continue
        given = arguments(node)
        index, ignored = given[name], given.get("ignore_index")
        if fake(index).is_floating_point():  # probabilities, as cross_entropy_loss takes them too
            continue
        if (index, ignored) not in made:
            made[index, ignored] = _behind(graph, index, ignored)
        node.replace_input_with(index, made[index, ignored])


def _behind(graph: fx.Graph, index: fx.Node, ignored: int | None) -> fx.Node:
    after = index.next
    while after.op == "placeholder":
        after = after.next

    def call(op: OpOverload, *args: fx.Node | float) -> fx.Node:
        with graph.inserting_before(after):
            node = graph.call_function(op, args)
        with mode_of([fake(index)]):
            node.meta["val"] = op(*(fake(one) if isinstance(one, fx.Node) else one for one in args))
        return node

    negative = call(_aten.lt.Scalar, index, 0)
    if ignored is not None and ignored < 0:
        negative = call(_aten.logical_and.default, negative, call(_aten.ne.Scalar, index, ignored))
    return call(_aten.masked_fill.Scalar, index, negative, BEHIND)
