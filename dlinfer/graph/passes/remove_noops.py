"""Drop calls that return their input: casts to the same dtype, views of the same shape, dropout outside training.

The pass must keep a call whose result differs from the input in dtype, sizes, strides or memory. The pass must also
keep a call whose result the graph returns, because the caller may tell this tensor object from the input.
"""

import torch
from torch import fx

from dlinfer.graph.ir.dialect import arguments, is_pure, overload, storages, tensor_or_none
from dlinfer.graph.ir.effects import reshaped_memory
from dlinfer.graph.ir.layout import same_place
from dlinfer.graph.passes.fusion.match import CASTS
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit, Rewriter

_aten = torch.ops.aten

# If the result has the input's memory and layout, these ops only make another tensor object.
_SAME = frozenset(
    (
        *CASTS,
        _aten.contiguous.default,
        _aten.alias.default,
        _aten.detach.default,
        _aten.lift_fresh.default,
        _aten.lift_fresh_copy.default,
        _aten.view.default,
        _aten.reshape.default,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.squeeze.dim,
        _aten.flatten.using_ints,
    )
)

_DROPOUT = frozenset((_aten.dropout.default, _aten.feature_dropout.default, _aten.alpha_dropout.default))


def _run(graph_module: fx.GraphModule) -> list[Edit]:
    rewriter = Rewriter(graph_module)
    nodes = list(graph_module.graph.nodes)
    reshaped = reshaped_memory(nodes)
    for node in nodes:
        if _changes_nothing(node) and reshaped.isdisjoint(storages(node)):
            source = node.all_input_nodes[0]
            rewriter.replace(f"drop {overload(node)}", [node], [source])
    return rewriter.edits


def _changes_nothing(node: fx.Node) -> bool:
    if node.target is _aten.detach_.default:  # how ``torch.tensor`` ends; it returns its argument
        return node.all_input_nodes[0].op != "placeholder"
    if node.op != "call_function" or not node.all_input_nodes or not is_pure(node):
        return False
    if any(user.op == "output" for user in node.users):
        return False  # the caller may tell the two objects apart
    source = node.all_input_nodes[0]
    if node.args and node.args[0] is not source:
        return False
    before, after = tensor_or_none(source), tensor_or_none(node)
    if before is None or after is None or not same_place(before, after):
        return False
    if node.target in _DROPOUT:
        return not arguments(node)["train"]
    return node.target in _SAME and bool(storages(node)) and storages(node) == storages(source)


REMOVE_NOOPS = Pass(
    "remove_noops", "calls that return their input hide patterns, and each of them takes time", _run
)
