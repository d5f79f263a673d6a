"""Merge equal computations and drop unused ones, never across a write.

Two nodes are equal when they call one op with equal arguments, and no memory that it reads was written in between.
A result whose memory is written later, or given to the caller who may write it, stays its own: merging would let
the write show through the other.
"""

from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.dialect import brings_symbol, is_pure, is_view, model_line, storages
from dlinfer.graph.ir.effects import effects_of, reshaped_memory
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewrite import Edit


def _run(graph_module: fx.GraphModule) -> list[Edit]:
    return _merge_equal(graph_module.graph) + _drop_unused(graph_module.graph)


def _merge_equal(graph: fx.Graph) -> list[Edit]:
    effects = effects_of(graph)
    reshaped = reshaped_memory(graph.nodes)
    returned = set(graph.output_node().all_input_nodes)
    given_away = {memory for node in returned for memory in storages(node)}
    seen: dict[Any, fx.Node] = {}
    edits = []
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_pure(node) or brings_symbol(node):
            continue
        if node in returned or not reshaped.isdisjoint(storages(node)):
            continue
        if not is_view(node) and (effects.ever_written(node) or storages(node) & given_away):
            continue
        epochs = () if is_view(node) else tuple(effects.writes_before(p, node) for p in node.all_input_nodes)
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), epochs)
        first = seen.setdefault(key, node)
        if first is node:
            continue
        edits.append(Edit("merge equal nodes", (node.name,), (first.name,), model_line(node)))
        node.replace_all_uses_with(first)
        graph.erase_node(node)
    return edits


def _drop_unused(graph: fx.Graph) -> list[Edit]:
    edits = []
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users or not is_pure(node):
            continue
        edits.append(Edit("drop unused node", (node.name,), (), model_line(node)))
        graph.erase_node(node)
    edits.reverse()
    return edits


def _frozen(value: Any) -> Any:
    """An argument as a key that tells 1 from 1.0 from True."""
    if isinstance(value, (list, tuple)):
        return (type(value), *(_frozen(item) for item in value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, slice):
        return (slice, _frozen(value.start), _frozen(value.stop), _frozen(value.step))
    if isinstance(value, float):
        return (float, value.hex())  # 0.0 == -0.0, and nan is not itself
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value), str(value))
    try:
        hash(value)
    except TypeError:
        return (type(value), id(value))
    return (type(value), value)


CLEAN_UP = Pass(
    "clean_up", "a model computes the same thing in every layer, and some things for nobody", _run
)
