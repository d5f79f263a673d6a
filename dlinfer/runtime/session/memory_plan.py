"""The memory plan: what a session's entries need, and when, as JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dlinfer.graph.codec.graph import Layout, ReadGraph
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port
from dlinfer.graph.ir.dialect import fake, is_size, storages
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.torch_private.expressions import SizeTextError, to_size
from dlinfer.graph.torch_private.fake_mode import storage_id
from dlinfer.graph.torch_private.symbols import symbols_of


def stage_plan(read: ReadGraph, interface: Interface, weights: Sequence[Layout]) -> dict[str, Any]:
    """Return the plan of one stage with what lies outside of its graph: weights, inputs and outputs."""
    return memory_plan(read, interface) | {
        "weights_bytes": sum(layout.nbytes for layout in weights),
        "written_weights": sorted(read.writes),
        "inputs": {port.name: _port_bytes(port) for port in interface.inputs},
        "outputs": {port.name: _port_bytes(port) for port in interface.outputs},
    }


def write_plan(plans: Mapping[str, Any], folder: Path) -> Path:
    """Write plans into ``memory_plan.json`` of a folder, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "memory_plan.json"
    path.write_text(json.dumps(plans, indent=1))
    return path


def _port_bytes(port: Port) -> int | None:
    """Bytes of an input or output at its highest sizes; None where there is no highest."""
    return None if -1 in port.max_shape else math.prod(port.max_shape) * port.dtype.itemsize


def memory_plan(read: ReadGraph, interface: Interface) -> dict[str, Any]:
    """Return what one graph needs at its highest sizes (those that it was compiled with where there is no highest).

    Every result of the graph that is memory of its own counts from the node that makes it to the last that reads
    it. An engine that fuses nodes needs less than that; weights and the caller's tensors are not part of it.
    """
    sizes = {name: high or interface.usual(name) for name, (_, high) in interface.symbols.items()}
    nodes = list(read.captured.graph_module.graph.nodes)
    names = {symbol: name for name, value in read.symbols.items() for symbol in symbols_of(value)}
    outside = effects_of(read.captured.graph_module.graph).outside
    lives: dict[int, dict[str, Any]] = {}
    for index, node in enumerate(nodes):
        for reader in (node, *node.all_input_nodes):
            for memory in storages(reader):
                if memory in lives:
                    lives[memory]["last"] = index
        if node.op != "call_function" or is_size(node):
            continue
        for memory in storages(node) - outside - set(lives):
            lives[memory] = {
                "name": node.name,
                "bytes": _nbytes(node, memory, sizes, names),
                "first": index,
                "last": index,
            }
    values = list(lives.values())
    return {"sizes": sizes, "nodes": len(nodes), "values": values, "peak_bytes": _peak(values)}


def _nbytes(node: fx.Node, memory: int, sizes: Mapping[str, int], names: Mapping[Any, str]) -> int | None:
    """The bytes behind a result; None where only running it tells."""
    for leaf in pytree.tree_leaves(fake(node)):
        if isinstance(leaf, torch.Tensor) and storage_id(leaf) == memory:
            try:
                shape = [to_size(size, names).evaluate(sizes) for size in leaf.shape]
            except SizeTextError:
                return None
            return math.prod(shape) * leaf.dtype.itemsize
    return None


def _peak(values: Sequence[Mapping[str, Any]]) -> int:
    changes: dict[int, int] = {}
    for value in values:
        changes[value["first"]] = changes.get(value["first"], 0) + (value["bytes"] or 0)
        changes[value["last"] + 1] = changes.get(value["last"] + 1, 0) - (value["bytes"] or 0)
    now = peak = 0
    for index in sorted(changes):
        now += changes[index]
        peak = max(peak, now)
    return peak
