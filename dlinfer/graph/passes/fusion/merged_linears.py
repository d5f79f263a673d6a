"""Merge linear layers that read the same input (q, k and v; gate and up) into one ``dlinfer.linears`` node.

The new node stands at the first of the merged layers, where all weights exist already. A fusion rule would insert it
before the last layer, so this is a pass and not a rule. The pass must not merge across a write to the input or a
weight.
"""

from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import arguments, tensor_of
from dlinfer.graph.ir.effects import Effects, effects_of
from dlinfer.graph.ir.flops import is_product
from dlinfer.graph.ir.layout import same_sizes
from dlinfer.graph.passes.fusion.match import FLOATS
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit, Rewriter

_LINEAR = (torch.ops.aten.linear.default, ops.linear.overload)

REACH = 2
"""The largest number of other matrix products that may stand between the first and the last of the merged layers.

A result that is computed early stays in memory longer. Layers of one block are close together: no other product stands
between q, k and v or gate and up, and one stands between the two down-projections of multi-head latent attention. But
all cross-attentions of an encoder-decoder read the encoder's output. If they were merged, the keys and values of all
layers would stay in memory."""


@dataclass
class _Group:
    """Layers to merge. rank: the number of matrix products in the graph before the first layer."""

    rank: int
    layers: list[fx.Node] = field(default_factory=list[fx.Node])


def merge_linears(graph_module: fx.GraphModule) -> list[Edit]:
    """Merge linear layers that read the same contents of an input. Return one edit for each merged group."""
    effects = effects_of(graph_module.graph)
    rewriter = Rewriter(graph_module)
    open_groups: dict[tuple[fx.Node, int], _Group] = {}
    groups: list[_Group] = []
    rank = 0
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        if _is_mergeable(node):
            x, *parameters = _operands(node)
            group = open_groups.get((x, effects.writes_before(x, node)))
            if group is None or not _may_join(group, parameters, node, rank, effects):
                group = open_groups[x, effects.writes_before(x, node)] = _Group(rank)
                groups.append(group)
            group.layers.append(node)
        rank += is_product(node)
    for group in groups:
        if len(group.layers) > 1:
            _merge(rewriter, group.layers)
    return rewriter.edits


def _may_join(group: _Group, parameters: list[fx.Node], node: fx.Node, rank: int, effects: Effects) -> bool:
    """Return whether a layer may be computed at the place of the group's first layer.

    node: the layer. parameters: the layer's weight and bias.
    rank: the number of matrix products in the graph before the layer.
    """
    first = group.layers[0]
    return (
        rank - group.rank - len(group.layers) <= REACH
        and all(parameter < first for parameter in parameters)
        and not effects.written_between(parameters, first, node)
    )


def _operands(node: fx.Node) -> list[Any]:
    call = arguments(node)
    bias = call.get("bias")
    return [call.get("x", call.get("input")), call["weight"], *([] if bias is None else [bias])]


def _is_mergeable(node: fx.Node) -> bool:
    """Return whether ``dlinfer.linears`` can compute this layer.

    A layer is refused if the graph computes its weight or bias.
    """
    if node.target not in _LINEAR:
        return False
    x, weight, *bias = _operands(node)
    if any(parameter.op not in ("placeholder", "get_attr") for parameter in (weight, *bias)):
        return False
    dtype = tensor_of(x).dtype
    return (
        dtype in FLOATS
        and tensor_of(weight).dim() == 2
        and all(same_sizes(tensor_of(vector).shape, tensor_of(weight).shape[:1]) for vector in bias)
        and all(tensor_of(parameter).dtype is dtype for parameter in (weight, *bias))
    )


def _merge(rewriter: Rewriter, layers: list[fx.Node]) -> None:
    first = layers[0]
    calls = [arguments(layer) for layer in layers]
    weights, biases = [call["weight"] for call in calls], [call.get("bias") for call in calls]
    merged = rewriter.call_like(first, first, ops.linears.overload, _operands(first)[0], weights, biases)
    merged.meta["val"] = [tensor_of(layer) for layer in layers]
    results = [rewriter.call_like(layer, first, getitem, merged, i) for i, layer in enumerate(layers)]
    rewriter.replace(MERGED_LINEARS.name, layers, results)


MERGED_LINEARS = Pass(
    name="merged_linears",
    why="q, k, v and gate, up read their input once in one parallel region; the weights are not copied.",
    run=merge_linears,
)
