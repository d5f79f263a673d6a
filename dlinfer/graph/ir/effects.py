"""What a graph does to memory: which is written when, which may be shared, and how results lie in it.

``effects_of(graph)`` is asked by everybody and worked out by nobody else. Memory is named by the identity of a fake's
storage, which views of one memory share. That tells memory apart that the graph itself makes. What was there before
it runs (inputs, parameters, buffers, constants) may share memory at a later call though it did not at this one: a
caller passes the same tensor twice, or feeds back a view of a buffer that an earlier call gave out, or a module's
buffer is replaced by a view of another. So a write to any of that counts as a write to all of it. What a graph names
as the target of a write (``is_written``) is asked apart, where copies are made or results bound.
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.dialect import (
    fake,
    reshapes_argument,
    storages,
    tensors_of,
    written_arguments,
)
from dlinfer.graph.ir.layout import Order, dense_order
from dlinfer.graph.torch_private.fake_mode import storage_id

Memory = frozenset[int]
"""Identities of memory, see ``storages``."""


class Effects:
    """The effects of a graph as it stands; ``effects_of`` gives them anew when it has changed.

    position: node -> its place in the graph. outside: the memory that was there before the graph runs.
    by_width: the same as memory of bools, of other numbers of one byte, and of wider numbers.
    written: the memory that nodes name as what they write.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        before = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        self.outside: Memory = frozenset(memory for node in before for memory in storages(node))
        self.by_width = _by_width(before)
        named = {
            node: frozenset(memory for target in targets for memory in storages(target))
            for node in graph.nodes
            if (targets := written_arguments(node))
        }
        self.written: Memory = frozenset().union(*named.values())
        self._writes = {node: self.shared_with(memory) for node, memory in named.items()}
        self._in_order = [(self.position[node], memory) for node, memory in self._writes.items()]

    def shared_with(self, memory: Memory) -> Memory:
        """The memory that some memory may be, or have a part of, at some call."""
        bools, small, wide = self.by_width
        if not memory.isdisjoint(small):
            return memory | self.outside
        more = [bools | small] if not memory.isdisjoint(bools) else []
        more += [wide | small] if not memory.isdisjoint(wide) else []
        return memory.union(*more)

    def writes(self, node: fx.Node) -> Memory:
        """The memory that a node may write."""
        return self._writes.get(node, frozenset())

    def is_written(self, node: fx.Node) -> bool:
        """Whether some node names the memory that this one's result lies in as what it writes."""
        return not self.written.isdisjoint(storages(node))

    def ever_written(self, node: fx.Node) -> bool:
        """Whether the memory that a node's result lies in may be written anywhere in the graph."""
        memory = storages(node)
        return any(not touched.isdisjoint(memory) for _, touched in self._in_order)

    def written_between(self, reads: Iterable[fx.Node], first: fx.Node, last: fx.Node) -> bool:
        """Whether memory of ``reads`` may be written after ``first`` and before ``last``, both excluded."""
        start, end = sorted((self.position[first], self.position[last]))
        memory = {identity for node in reads for identity in storages(node)}
        return any(
            start < index < end and not touched.isdisjoint(memory) for index, touched in self._in_order
        )

    def writes_before(self, node: fx.Node, place: fx.Node) -> int:
        """How many writes to ``node``'s memory may stand before ``place``; where it is equal, equal values are read."""
        memory, end = storages(node), self.position[place]
        return sum(1 for index, touched in self._in_order if index < end and not touched.isdisjoint(memory))

    def admit(self, graph: fx.Graph) -> None:
        """Give nodes that were put into the graph since, and write nothing, the position of their neighbour.

        For a pass that makes many small edits: what else changed is known to it, and counting anew takes longer.
        """
        before = 0
        for node in graph.nodes:
            before = self.position.setdefault(node, before)


def _by_width(nodes: Iterable[fx.Node]) -> tuple[Memory, Memory, Memory]:
    """Memory of bools, of other numbers of one byte, and of wider ones.

    Bools and wider numbers are assumed to be apart, which each call of a compiled graph checks (``lowering/apart``).
    A mask that is passed in is then no reason for a cache to wait, nor the other way round. Bytes may be either.
    """
    found: tuple[set[int], set[int], set[int]] = (set(), set(), set())
    for node in nodes:
        for tensor in tensors_of(node):
            kind = 0 if tensor.dtype is torch.bool else 1 if tensor.dtype.itemsize == 1 else 2
            if tensor.layout == torch.strided:
                found[kind].add(storage_id(tensor))
    bools, small, wide = map(frozenset, found)
    both = bools & wide  # one memory that is seen as both
    return bools - both, small | both, wide - both


def memory_read(node: fx.Node) -> Memory:
    """The memory that a node's arguments lie in."""
    return frozenset(memory for parent in node.all_input_nodes for memory in storages(parent))


def reshaped_memory(nodes: Iterable[fx.Node]) -> Memory:
    """The memory of tensors that some of these nodes give other sizes in place.

    Several nodes may give one tensor object (``x.float()`` of float32 is ``x``), and all see its new sizes: such
    memory's views are told apart by their order alone.
    """
    return frozenset(
        memory
        for node in nodes
        if reshapes_argument(node) and node.target is not torch.ops.aten.detach_.default  # sizes stay
        for memory in memory_read(node)
    )


def made_memory(node: fx.Node) -> bool:
    """Whether a node's result is a tensor in memory that the node, or whose results it is one of, has made."""
    if not isinstance(fake(node), torch.Tensor):
        return False
    maker = node
    if node.target is operator.getitem:
        maker = node.all_input_nodes[0]
        while (
            maker.op == "placeholder" and "producer" in maker.meta
        ):  # a list that comes into a cut-out graph
            maker = maker.meta["producer"]
    mine = storages(node)
    return maker.op == "call_function" and bool(mine) and mine.isdisjoint(memory_read(maker))


def layout_to_keep(node: fx.Node) -> Order | None:
    """How the result of a library's kernel is to be laid out for those who read it by its fake's strides.

    None where that is certain without a look: numbers, single elements, views, and memory that was there before. None
    too where the result has gaps or overlaps by its fake, which nothing here would give it: see ``has_layout``.

    A fake's strides are what an op's Python description says, and the kernel behind it may lay its result out in
    another way: by the CPU, its libraries, the backend that attention is told to use, a plugin's taste. So only our
    own kernels, and loops that are compiled for these strides, are taken at their word.
    """
    value = fake(node)
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not made_memory(node):
        return None
    return dense_order(value)


def has_layout(node: fx.Node) -> bool:
    """Whether the strides of a kernel's result may be read off its fake, once it lies as ``layout_to_keep`` says."""
    value = fake(node)
    return not isinstance(value, torch.Tensor) or not made_memory(node) or dense_order(value) is not None


_NAME = "_dlinfer_effects"


def effects_of(graph: fx.Graph) -> Effects:
    """The effects of a graph: worked out at the first question, and again whenever a node, its arguments or its fake
    has changed since. Whoever holds on to the answer while editing the graph answers for that itself."""
    state = [(node, node.args, node.kwargs, fake(node)) for node in graph.nodes]
    known: tuple[list[Any], Effects] | None = getattr(graph, _NAME, None)
    if known is not None and _same_state(known[0], state):
        return known[1]
    made = Effects(graph)
    setattr(graph, _NAME, (state, made))
    return made


def _same_state(old: list[Any], new: list[Any]) -> bool:
    """Whether two states are of the same objects, all of which they keep alive."""
    return len(old) == len(new) and all(
        one is other
        for before, after in zip(old, new, strict=True)
        for one, other in zip(before, after, strict=True)
    )
