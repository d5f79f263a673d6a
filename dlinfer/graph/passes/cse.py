"""CSE: replace a call by an earlier call with the same op, arguments and memory contents.

The pass must not merge two calls across a write to memory that they read. It must also keep two results apart if the
graph, or a caller who receives them, may write into one of them later: the write would change the other.
"""

from collections.abc import Mapping

import torch
from torch import fx
from torch.fx.node import Argument

from dlinfer.graph.ir.dialect import brings_symbol, is_pure, memory_read, storages
from dlinfer.graph.ir.effects import effects_of, reshaped_memory
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit, Rewriter, erase


def _run(graph_module: fx.GraphModule) -> list[Edit]:
    graph = graph_module.graph
    rewriter = Rewriter(graph_module)
    effects = effects_of(graph)
    reshaped = reshaped_memory(graph.nodes)
    returned = set(graph.output_node().all_input_nodes)
    given_away = {memory for node in returned for memory in storages(node)}
    erased: set[int] = set()  # memory of merged nodes; views of it become views of the node that stays
    seen: dict[object, fx.Node] = {}
    edits: list[Edit] = []
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_pure(node) or brings_symbol(node):
            continue
        memory = storages(node)
        if node in returned or not reshaped.isdisjoint(memory):
            continue
        of_arguments = bool(memory) and memory <= memory_read(node) | erased
        if not of_arguments and (effects.ever_written(node) or memory & given_away):
            continue
        epochs = () if of_arguments else tuple(effects.writes_before(p, node) for p in node.all_input_nodes)
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), epochs)
        first = seen.setdefault(key, node)
        if first is not node:
            erased |= memory - storages(first)
            edits.append(erase("merge equal nodes", node, by=first))
        elif not erased.isdisjoint(memory):
            node.meta["val"] = rewriter.fake_call(node.target, *node.args, **node.kwargs)
    return edits


def _frozen(value: Argument) -> object:
    """Return an argument as a dict key. The keys of 1, 1.0 and True differ."""
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    if isinstance(value, Mapping):
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


CSE = Pass("cse", "a model computes the same thing in every layer", _run)
