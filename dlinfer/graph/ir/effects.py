"""Which memory is written when: what a pass must know before it moves a read or merges two of them."""

from collections.abc import Iterable

from torch import fx

from dlinfer.graph.ir.dialect import STATIC, storages, written_arguments


class Writes:
    """The writes of a graph, in its order.

    Inputs that are no parameters may share memory at some later call though they did not at this one, so a
    write to one of them counts as a write to all of them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        inputs = [node for node in graph.nodes if node.op == "placeholder" and not node.meta.get(STATIC)]
        self._inputs = {identity for node in inputs for identity in storages(node)}
        self._writes: list[tuple[int, set[int]]] = []
        for node, index in self.position.items():
            touched = {identity for target in written_arguments(node) for identity in storages(target)}
            if touched & self._inputs:
                touched |= self._inputs
            if touched:
                self._writes.append((index, touched))

    def between(self, reads: Iterable[fx.Node], first: fx.Node, last: fx.Node) -> bool:
        """Whether memory of ``reads`` is written after ``first`` and before ``last``, both excluded."""
        start, end = self.position[first], self.position[last]
        if start > end:
            start, end = end, start
        memory = {identity for node in reads for identity in storages(node)}
        return any(start < index < end and touched & memory for index, touched in self._writes)

    def ever(self, node: fx.Node) -> bool:
        """Whether a node's memory is written anywhere in the graph."""
        memory = storages(node)
        return any(touched & memory for _, touched in self._writes)

    def epoch(self, node: fx.Node) -> int:
        """How many writes to a node's own memory stand before it; equal epochs read equal values."""
        return self.epoch_at(node, node)

    def epoch_at(self, node: fx.Node, place: fx.Node) -> int:
        """How many writes to ``node``'s memory stand before ``place``."""
        memory, end = storages(node), self.position[place]
        return sum(1 for index, touched in self._writes if index < end and touched & memory)
