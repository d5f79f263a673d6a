"""The memory plan as JSON: the size of each tensor of a stage in bytes, and the first and the last node that use it."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dlinfer.graph.codec.graph import Layout, ReadGraph
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.ir.dialect import fake, is_size, storages
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.torch_private.expressions import SizeTextError, to_size
from dlinfer.graph.torch_private.fake_mode import storage_id
from dlinfer.graph.torch_private.symbols import symbols_of
from dlinfer.runtime.session.io_memory import nbytes


class _Life(TypedDict):
    """A storage that a node allocates.

    first: the index of this node. last: the index of the last node that reads the storage.
    """

    name: str
    bytes: int | None
    first: int
    last: int


def memory_plan(read: ReadGraph, interface: Interface, weights: Sequence[Layout]) -> dict[str, object]:
    """Return, as a dict for JSON, how many bytes one stage needs at its highest sizes.

    A size without a limit counts with the value that it had when the graph was compiled. A storage that a node
    allocates counts from this node to the last node that reads the storage. An engine that fuses nodes needs less
    memory. Weights, inputs and outputs are listed separately.
    """
    sizes = {name: high or interface.usual(name) for name, (_, high) in interface.symbols.items()}
    nodes = list(read.captured.graph_module.graph.nodes)
    names = {symbol: name for name, value in read.symbols.items() for symbol in symbols_of(value)}
    outside = effects_of(read.captured.graph_module.graph).outside
    lives: dict[int, _Life] = {}
    for index, node in enumerate(nodes):
        for reader in (node, *node.all_input_nodes):
            for memory in storages(reader) & set(lives):
                lives[memory]["last"] = index
        if node.op == "call_function" and not is_size(node):
            for memory in storages(node) - outside - set(lives):
                size = _nbytes(node, memory, sizes, names)
                lives[memory] = {"name": node.name, "bytes": size, "first": index, "last": index}
    changes: defaultdict[int, int] = defaultdict(int)
    for life in lives.values():
        changes[life["first"]] += life["bytes"] or 0
        changes[life["last"] + 1] -= life["bytes"] or 0
    now = peak = 0
    for index in sorted(changes):
        now += changes[index]
        peak = max(peak, now)
    return {
        "sizes": sizes,
        "nodes": len(nodes),
        "values": list(lives.values()),
        "peak_bytes": peak,
        "weights_bytes": sum(math.prod(layout.sizes) * layout.dtype.itemsize for layout in weights),
        "written_weights": sorted(read.writes),
        "inputs": {port.name: nbytes(port) for port in interface.inputs},
        "outputs": {port.name: nbytes(port) for port in interface.outputs},
    }


def _nbytes(node: fx.Node, memory: int, sizes: Mapping[str, int], names: Mapping[object, str]) -> int | None:
    """Return the size in bytes of the node's first result that lies in a storage; None if only a run determines it.

    memory: the storage's id (``storage_id``).
    """
    for leaf in pytree.tree_leaves(fake(node)):
        if isinstance(leaf, torch.Tensor) and storage_id(leaf) == memory:
            try:
                shape = [to_size(size, names).evaluate(sizes) for size in leaf.shape]
            except SizeTextError:
                return None
            return math.prod(shape) * leaf.dtype.itemsize
    return None
