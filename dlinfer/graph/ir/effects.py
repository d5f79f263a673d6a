"""Memory effects of a graph: which memory nodes write, which tensors may alias, and how results are laid out.

``effects_of(graph)`` computes the effects. The storage of a fake identifies its memory; views of the same memory share
it. This is exact for memory that the graph allocates.

Outside memory is memory that existed before the graph: inputs, parameters, buffers and constants. Outside tensors may
alias at a later call even if they did not alias at capture. For example, a caller may pass one tensor twice. So a write
to one outside tensor counts as a write to all others. There is one exception: a bool tensor is assumed not to alias a
tensor of a dtype wider than one byte. Only ``is_written`` ignores possible aliases: it looks at the memory of each
write's target alone.
"""

import operator
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from dlinfer.graph.ir.dialect import (
    fake,
    memory_read,
    reshapes_argument,
    storages,
    tensor_or_none,
    tensors_of,
    written_arguments,
)
from dlinfer.graph.ir.layout import Order, dense_order
from dlinfer.graph.torch_private.fake_mode import storage_id

Memory = frozenset[int]
"""Storage ids, see ``storages``."""


class Effects:
    """The effects of a graph when ``effects_of`` was called.

    position: node -> its index in the graph.
    outside: memory that existed before the graph runs.
    by_width: the outside memory, split into bools, other numbers of one byte, and wider numbers.
    written: memory that nodes name as the target of a write.
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
        """Return ``memory`` and all outside memory that may alias it at some call."""
        bools, small, wide = self.by_width
        if not memory.isdisjoint(small):
            return memory | self.outside
        more = [bools | small] if not memory.isdisjoint(bools) else []
        more += [wide | small] if not memory.isdisjoint(wide) else []
        return memory.union(*more)

    def writes(self, node: fx.Node) -> Memory:
        return self._writes.get(node, frozenset())

    def is_written(self, node: fx.Node) -> bool:
        """Return whether some node names this result's memory as the target of a write."""
        return not self.written.isdisjoint(storages(node))

    def ever_written(self, node: fx.Node) -> bool:
        """Return whether any node of the graph may write this result's memory."""
        return any(True for _ in self._writes_to([node]))

    def written_between(self, reads: Iterable[fx.Node], first: fx.Node, last: fx.Node) -> bool:
        """Return whether a node between ``first`` and ``last`` may write memory of ``reads``."""
        start, end = sorted((self.position[first], self.position[last]))
        return any(start < index < end for index in self._writes_to(reads))

    def writes_before(self, node: fx.Node, place: fx.Node) -> int:
        """Return how many writes before ``place`` may touch a node's memory.

        If the counts for two places are equal, the memory has the same contents at both.
        """
        return sum(index < self.position[place] for index in self._writes_to([node]))

    def _writes_to(self, nodes: Iterable[fx.Node]) -> Iterator[int]:
        """Yield the positions of the writes that may touch memory of these nodes."""
        memory = {identity for node in nodes for identity in storages(node)}
        return (index for index, touched in self._in_order if not touched.isdisjoint(memory))

    def admit(self, graph: fx.Graph) -> None:
        """Give each new node the position of the node before it. The new nodes must not write.

        Passes with many small edits call this, because computing all effects again takes longer.
        """
        before = 0
        for node in graph.nodes:
            before = self.position.setdefault(node, before)


def _by_width(nodes: Iterable[fx.Node]) -> tuple[Memory, Memory, Memory]:
    """Return the memory of bools, of other numbers of one byte, and of wider numbers.

    Bools are assumed not to alias wider numbers, and each call of a compiled graph checks this (``lowering/apart``). So
    a read of a mask may move across a write to a cache. Other numbers of one byte may alias bools and wider numbers.
    """
    by_kind: tuple[set[int], set[int], set[int]] = (set(), set(), set())
    for node in nodes:
        for tensor in tensors_of(node):
            kind = 0 if tensor.dtype is torch.bool else 1 if tensor.dtype.itemsize == 1 else 2
            if tensor.layout == torch.strided:
                by_kind[kind].add(storage_id(tensor))
    bools, small, wide = map(frozenset, by_kind)
    both = bools & wide  # one memory with views of both
    return bools - both, small | both, wide - both


def reshaped_memory(nodes: Iterable[fx.Node]) -> Memory:
    """Return the memory of tensors whose sizes some of these nodes change in place.

    Several nodes may return one tensor object (``x.float()`` of a float32 tensor ``x`` is ``x``). After the change, all
    of them have the new sizes. So nodes that use this memory must keep their order.
    """
    return frozenset(
        memory
        for node in nodes
        if reshapes_argument(node) and node.target is not torch.ops.aten.detach_.default  # sizes stay
        for memory in memory_read(node)
    )


def made_memory(node: fx.Node) -> bool:
    """Return whether a node allocated its tensor.

    If the node takes an item of a sequence, return whether the op that returned the sequence allocated the item.
    """
    maker = node
    if node.target is operator.getitem:
        maker = node.all_input_nodes[0]
        while maker.op == "placeholder" and "producer" in maker.meta:  # a list as the input of a subgraph
            maker = maker.meta["producer"]
    if tensor_or_none(node) is None or maker.op != "call_function":
        return False
    memory = storages(node)
    return bool(memory) and memory.isdisjoint(memory_read(maker))


def layout_to_keep(node: fx.Node) -> Order | None:
    """Return the order of dimensions in memory that a kernel's result must get; None if nothing has to be enforced.

    Readers of the result rely on the strides of its fake. These strides come from the op's Python description. The real
    kernel may use other strides, depending on the CPU, its libraries or the attention backend. So only dlinfer's
    kernels, and loops compiled for these strides, are trusted.

    Nothing is enforced for numbers, tensors without dimensions, views and memory that existed before the graph. If the
    fake has gaps or overlaps, its layout cannot be enforced (``has_layout``).
    """
    value = fake(node)
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not made_memory(node):
        return None
    return dense_order(value)


def has_layout(node: fx.Node) -> bool:
    """Return whether a kernel's result has its fake's strides after ``layout_to_keep`` is enforced."""
    value = fake(node)
    return not isinstance(value, torch.Tensor) or not made_memory(node) or dense_order(value) is not None


_NAME = "_dlinfer_effects"


def effects_of(graph: fx.Graph) -> Effects:
    """Return the effects of a graph, cached until a node, its arguments or its fake changes.

    A pass that edits the graph and uses the returned object afterwards must update the object (``Effects.admit``).
    """
    state: list[object] = [x for node in graph.nodes for x in (node, node.args, node.kwargs, fake(node))]
    known: tuple[list[object], Effects] | None = getattr(graph, _NAME, None)
    if known is not None and len(known[0]) == len(state) and all(map(operator.is_, known[0], state)):
        return known[1]
    effects = Effects(graph)
    setattr(graph, _NAME, (state, effects))
    return effects
