"""Functionalize a region: make a graph of values, without writes and aliases.

Engines that have no in-place ops need this form (OpenVINO, ONNX). Each in-place op becomes its functional form
(``functional_ops``). A write through a view becomes a new value of the base tensor (``view_inverses``), and later reads
use that value. The new contents of inputs are outputs. An engine binds each of these outputs to the input's own memory,
so a KV cache is never copied. If an output of the region is a view, torch makes it after the engine has run
(``outputs``).
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, map_arg

from dlinfer.errors import NotAFunctionError
from dlinfer.graph.functional.aliasing import overlapping, reads_in_place
from dlinfer.graph.functional.functional_ops import FunctionalCall, functional_call
from dlinfer.graph.functional.outputs import is_same, results_of, viewed
from dlinfer.graph.functional.view_inverses import ViewWrite
from dlinfer.graph.ir.dialect import (
    STATIC,
    brings_symbol,
    fake,
    gives_something,
    is_compute,
    is_random,
    model_source,
    overload,
    schema_name,
    storages,
    tensor_or_none,
    written_arguments,
)
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.ir.layout import same_sizes
from dlinfer.graph.ir.own_ops import CHECKS

aten = torch.ops.aten


@dataclass(frozen=True)
class Function:
    """A functionalized region.

    graph_module: takes the region's inputs, and returns a tuple of tensors. The engine must return these tensors
        contiguous. The placeholders keep ``val`` and STATIC in their meta. No node of the module writes.
    writes: for each output that is the new content of an input, the input's index; None for a new tensor.
    in_place: indices of written inputs whose memory the engine may overwrite with the new content while it runs. Each
        element of the new content depends on one element of the old content, at the same index. No other op reads the
        old content.
    """

    graph_module: fx.GraphModule
    writes: tuple[int | None, ...]
    in_place: frozenset[int]
    _results: fx.GraphModule
    _checks: fx.GraphModule | None

    @property
    def inputs(self) -> list[fx.Node]:
        """The placeholders of ``graph_module``."""
        return self.graph_module.graph.find_nodes(op="placeholder")

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes whose tensors ``graph_module`` returns."""
        return output_nodes(self.graph_module.graph)

    @property
    def weights(self) -> tuple[int, ...]:
        """Indices of the input tensors that are the same at each call and never written."""
        return tuple(
            index
            for index, node in enumerate(self.inputs)
            if node.meta.get(STATIC) and index not in self.writes and tensor_or_none(node) is not None
        )

    def check(self, inputs: Sequence[object]) -> None:
        """Run the region's assertions on its inputs, before the engine runs."""
        if self._checks is not None:
            self._checks(*inputs)

    def conflict(self, inputs: Sequence[object]) -> str | None:
        """Return a reason not to run the function, if a written input overlaps another input or itself; else None."""
        return overlapping(inputs, {index for index in self.writes if index is not None})

    def finish(self, inputs: Sequence[object], values: Sequence[Tensor]) -> tuple[object, ...]:
        """Return the region's outputs.

        inputs: the inputs, which already have their new contents. values: the outputs of the function.
        """
        written = len(self.writes) - self.writes.count(None)
        return self._results(*inputs, *values[written:])


def refusal(node: fx.Node) -> str | None:
    """Return a reason not to functionalize a node; None if it can be functionalized. For ``Engine.refuses``."""
    if is_random(node):
        return "it draws from torch's random generator"
    if brings_symbol(node):
        return "it has a data-dependent size"
    if written_arguments(node):
        functional = functional_call(node)
        return functional if isinstance(functional, str) else None
    if node.op == "call_function" and not gives_something(node) and not is_check(node):
        return "it has an effect and no result"
    return None


def function_of(region: Subgraph) -> Function:
    """Return the functionalized region. Raises NotAFunctionError with the node that cannot be functionalized."""
    return _Builder(region.graph_module).build()


_METADATA = torch.ops.aten._assert_tensor_metadata.default
"""The op that asserts a tensor's dtype, device and layout. Capture has already checked these on fakes."""


def is_check(node: fx.Node) -> bool:
    """Return whether a node is an assertion: it may raise, and has no result. ``Function.check`` runs assertions."""
    return overload(node) is _METADATA or schema_name(node) in CHECKS


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    outputs: Any = graph.output_node().args[0]
    return list(outputs)


class _Builder:
    """Builds a Function in one walk over a region's nodes.

    The old graph is the region's graph. The new graph is the functionalized one. A memory id stands for memory that a
    tensor and its views share.

    memory: old node -> the ids of its memory.
    root: memory id -> the first old node in this memory, the tensor that later nodes view.
    content: id of written memory -> the new node with the present value of the memory's root.
    writes: memory id -> the number of writes so far.
    value: old node -> a pair. It has the number of writes to the node's memory when the node's value was computed, and
        the new node with this value.
    source: meta of the node that the walk is at.
    """

    def __init__(self, owner: fx.GraphModule) -> None:
        self.owner = owner
        self.placeholders = owner.graph.find_nodes(op="placeholder")
        self.graph = fx.Graph()
        self.memory: dict[fx.Node, set[int]] = {}
        self.root: dict[int, fx.Node] = {}
        self.content: dict[int, fx.Node] = {}
        self.writes: Counter[int] = Counter()
        self.value: dict[fx.Node, tuple[int, Any]] = {}
        self.checks: list[fx.Node] = []
        self.source: dict[str, object] = {}

    def build(self) -> Function:
        placed = Counter(memory for node in self.placeholders for memory in storages(node))
        shared = {memory for memory, times in placed.items() if times > 1}
        for number, node in enumerate(self.owner.graph.nodes):
            if node.op == "output":
                continue
            self.memory[node] = self._located(node, shared, number)
            for memory in self.memory[node] if tensor_or_none(node) is not None else ():
                self.root.setdefault(memory, node)
            self._walk(node)
        return self._finished()

    def _located(self, node: fx.Node, shared: set[int], number: int) -> set[int]:
        """Return the ids of a node's memory. number: the node's position in the graph.

        shared: memory that several inputs view, such as one allocation with the KV caches of all layers. Each of these
            inputs gets an id of its own, because the views are assumed not to overlap. Each call checks this assumption
            (``Function.conflict``).
        """
        memory = storages(node)
        if not memory & shared:
            return memory
        if node.op == "placeholder":
            return {-1 - number}
        parent = viewed(node)
        return memory - shared | (self.memory[parent] if parent is not None else set())

    def _walk(self, node: fx.Node) -> None:
        reason = refusal(node) if node.op == "call_function" else None
        if reason is not None:
            raise NotAFunctionError(node=node.name, reason=reason)
        if written_arguments(node):
            self._write(node)
        elif is_check(node):
            self.checks += [] if overload(node) is _METADATA else [node]
        else:
            self.value[node] = (self._writes_to(node), self.graph.node_copy(node, self.current))

    def emit(
        self,
        op: Callable[..., object],
        args: tuple[Argument, ...],
        value: object,
        kwargs: Mapping[str, Argument] | None = None,
    ) -> fx.Node:
        """Insert a call into the new graph and return it.

        The call gets the model's line of the node that the walk is at.
        args, kwargs: the arguments. An old node among them stands for its present value. value: the call's fake result.
        """

        def new(node: fx.Node) -> fx.Node:
            return node if node.graph is self.graph else self.current(node)

        call = self.graph.call_function(op, map_arg(args, new), map_arg(dict(kwargs or {}), new))
        call.meta = {**self.source, "val": value}
        return call

    # --- what memory holds now

    def _writes_to(self, node: fx.Node) -> int:
        return sum(self.writes[memory] for memory in self.memory[node])

    def current(self, node: fx.Node) -> Any:
        """Return the new node with the present value of an old node's memory."""
        writes, value = self.value[node]
        if writes == self._writes_to(node):
            return value
        memories = self.memory[node]
        if len(memories) == 1 and self.root.get(*memories) is node:
            value = self.content[next(iter(memories))]
        else:
            value = self._repeat_view(node)
        self.value[node] = (self._writes_to(node), value)
        return value

    def _repeat_view(self, node: fx.Node) -> Any:
        parent = viewed(node)
        if parent is None:
            reason = "one of its results is written, and another result is read later"
            raise NotAFunctionError(node=node.name, reason=reason)
        return self.current(parent) if is_same(node, parent) else self.graph.node_copy(node, self.current)

    # --- writes

    def _write(self, node: fx.Node) -> None:
        self.source = model_source(node)
        functional = functional_call(node)
        assert isinstance(functional, FunctionalCall), "refused before"
        new = self._contents(node, functional)
        own = new[: functional.results]
        for target, content in zip(functional.targets, new[functional.results :], strict=True):
            self._store(target, content)
        if not gives_something(node):
            return
        result = own[0] if len(own) == 1 else own if own else self.current(functional.targets[0])
        self.value[node] = (self._writes_to(node), result)

    def _contents(self, node: fx.Node, functional: FunctionalCall) -> list[fx.Node]:
        """Insert the functional op for ``node``.

        Return the results of the original op, then the new content of each target.
        """
        targets, count = functional.targets, functional.results
        if functional.op is None:
            source = functional.args[0]
            if not isinstance(source, fx.Node):
                raise NotAFunctionError(node=node.name, reason="it copies a number into a tensor")
            return [self._fitted(self.current(source), fake(source), targets[0])]
        own = [] if count == 0 else [fake(node)] if count == 1 else fake(node)
        fakes = [*own, *(self._raw(functional, target) for target in targets)]
        result = tuple(fakes) if functional.listed else fakes[0]
        parts = [call := self.emit(functional.op, functional.args, result, functional.kwargs)]
        if functional.listed:
            parts = [self.emit(operator.getitem, (call, index), value) for index, value in enumerate(fakes)]
        new = zip(parts[count:], fakes[count:], targets, strict=True)
        return [*parts[:count], *(self._fitted(part, value, target) for part, value, target in new)]

    def _raw(self, functional: FunctionalCall, target: fx.Node) -> Tensor:
        """Return the fake that the functional op returns for a target. Its dtype may differ from the target's.

        An in-place op casts its result to the target's dtype; the functional op does not.
        """
        assert functional.op is not None
        value = fake(target)
        if torch.Tag.pointwise not in functional.op.tags:
            return value
        args, kwargs = map_arg((functional.args, functional.kwargs), lambda node: _unit(fake(node)))
        with torch.no_grad():
            dtype = functional.op(*args, **kwargs).dtype
        return value if dtype == value.dtype else value.to(dtype)

    def _fitted(self, value: fx.Node, content: Tensor, target: fx.Node) -> fx.Node:
        """Cast and expand a new content to the target's dtype and sizes. Return the node of the result.

        value: the new node of the content. content: the fake of the content.
        """
        old = fake(target)
        if content.dtype != old.dtype:
            cast = torch.empty_like(content, dtype=old.dtype)
            value = self.emit(aten._to_copy.default, (value,), cast, {"dtype": old.dtype})
        if not same_sizes(content.shape, old.shape):
            value = self.emit(aten.expand.default, (value, self._sizes(target)), old)
        return value

    def _store(self, target: fx.Node, content: fx.Node) -> None:
        """Record ``content`` as the new value of ``target`` and of its base tensor."""
        (memory,) = self.memory[target]
        root = self.root[memory]
        if root.op == "get_attr":
            raise NotAFunctionError(node=target.name, reason="the graph writes into a constant")
        node = target
        while node is not root:
            parent = viewed(node)
            assert parent is not None, "every node except the first in its memory is a view"
            if not is_same(node, parent):
                view, index, parent = self._view(node, parent)
                write = ViewWrite(view, index, self.current(parent), content, self.emit, self._sizes)
                content = write.new_base()
            node = parent
        self.content[memory] = content
        self.writes[memory] += 1

    def _view(self, node: fx.Node, parent: fx.Node) -> tuple[fx.Node, int | None, fx.Node]:
        """Return three things: the view op that made ``node``, an index, and the node of the base tensor.

        If the view op has several results, the index says which of them ``node`` is. Otherwise the index is None.
        """
        if node.target is not operator.getitem:
            return node, None, parent
        whole, index = viewed(parent), node.args[1]
        if whole is None or not isinstance(index, int):
            raise NotAFunctionError(
                node=node.name, reason="the graph writes into an item of an item of a result"
            )
        return parent, index, whole

    def _sizes(self, node: fx.Node) -> list[Argument]:
        return [
            size if isinstance(size, int) else self.emit(aten.sym_size.int, (node, dim), size)
            for dim, size in enumerate(fake(node).shape)
        ]

    # --- the end

    def _finished(self) -> Function:
        self.source = {}
        written = [
            index
            for index, node in enumerate(self.placeholders)
            for memory in self.memory[node]
            if memory in self.content and self.root[memory] is node
        ]
        values = [self.current(self.placeholders[index]) for index in written]
        fresh, results = results_of(self.owner, output_nodes(self.owner.graph))
        for base, order in fresh:
            value = self.current(base)
            if order is not None:
                value = self.emit(aten.permute.default, (value, [*order]), fake(base).permute(order))
            values.append(value)
        self.graph.output(tuple(values))
        self.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        module = fx.GraphModule(self.owner, self.graph, type(self.owner).__name__)
        in_place = frozenset(
            index
            for index, value in zip(written, values, strict=False)
            if reads_in_place(self.graph, index, value)
        )
        return Function(module, (*written, *[None] * len(fresh)), in_place, results, self._check_module())

    def _check_module(self) -> fx.GraphModule | None:
        """Return a module that runs the region's assertions on the region's inputs; None if there are none.

        Raises NotAFunctionError if an assertion reads a result that the region has to compute.
        """
        if not self.checks:
            return None
        needed = dict.fromkeys(self.placeholders)
        waiting = list(self.checks)
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed[node] = None
                waiting += node.all_input_nodes
                if node not in self.checks and is_compute(node):
                    reason = "an assertion reads a value that the region computes"
                    raise NotAFunctionError(node=node.name, reason=reason)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in sorted(needed):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(())
        return fx.GraphModule(self.owner, graph, "checks")


def _unit(value: object) -> Tensor | float:
    """Return a one-element tensor or a number in place of a fake.

    Such values are for running an op, to see the dtype of its result.
    """
    if isinstance(value, Tensor):
        return torch.empty((1,) * value.dim(), dtype=value.dtype, device="meta")
    if isinstance(value, (torch.SymBool, bool)):
        return True
    return 1.0 if isinstance(value, (torch.SymFloat, float)) else 1
