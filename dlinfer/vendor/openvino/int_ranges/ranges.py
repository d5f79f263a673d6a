"""Bound the integers of a region (part of a graph) before each call, for an engine that keeps fewer bits than torch.

Each value gets an interval, computed from the intervals of its operands. Lowering only records the order of ops. The
intervals follow from the actual inputs and sizes of each call. So a model whose numbers stay small, like token ids and
positions, always runs in the engine.

To save time, inputs and sizes are first rounded up to powers of two. If the integers stay within the limits, that is
remembered for all calls up to these bounds, so most calls only compare a few numbers. The result of an op without a
rule may be any number of its dtype."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from dlinfer.graph.engine_kit.output_sizes import SizeText, reader, sizes_of
from dlinfer.graph.ir.dialect import arguments, attribute, fake, op_name, overload
from dlinfer.vendor.openvino.int_ranges.kept import Interval, Kept, range_of
from dlinfer.vendor.openvino.int_ranges.rules import ARITHMETIC, KEEPS, NUMBERS, ORDERS, PLACES, hull, many


class Ranges:
    """Callable: takes a call's inputs. Returns a reason if integers may exceed the engine's bits; else None.

    Several threads may call it concurrently. inputs: positions of the inputs whose intervals the caller has to pass."""

    def __init__(self, graph: fx.Graph, kept: Kept) -> None:
        """Raise UnknownSizeError if a size in the graph does not follow from the sizes of its inputs."""
        placeholders = graph.find_nodes(op="placeholder")
        self._kept = kept
        self._sizes: list[SizeText] = []
        self._values = [fake(node) for node in placeholders]
        needed = _needed(graph, kept)
        self._steps = [
            self._step(node)
            for node in graph.nodes
            if node in needed and node.op in ("call_function", "get_attr")
        ]
        self.inputs = [
            index for index, node in enumerate(placeholders) if node in needed and _is_whole(fake(node))
        ]
        self._nodes = [placeholders[index] for index in self.inputs]
        self._numbers = reader([self._sizes])
        self._fit: set[tuple[Any, ...]] = set()

    def __call__(self, inputs: Sequence[Any], ranges: Mapping[int, Interval]) -> str | None:
        """Check a call. ranges: the interval of each input in ``self.inputs``, by the input's position."""
        if not self._steps:
            return None
        (numbers,) = self._numbers(inputs)
        exact = [ranges[index] for index in self.inputs]
        wide = tuple(map(_rounded, exact)), tuple(_rounded((value, value)) for value in numbers)
        if wide in self._fit:
            return None
        if self._walk(*wide) is None:
            if len(self._fit) < 1024:
                self._fit.add(wide)
            return None
        return self._walk(exact, [(value, value) for value in numbers])

    def _walk(self, ranges: Sequence[Interval], numbers: Sequence[Interval]) -> str | None:
        known: dict[fx.Node, Any] = dict(zip(self._nodes, ranges, strict=True))
        for step in self._steps:
            if (reason := step(known, numbers)) is not None:
                return reason
        return None

    def _number(self, value: Any) -> int:
        """Return the position of a size in the list of sizes that each call computes.

        A new size is appended to the list.
        """
        (size,) = sizes_of([[value]], self._values)[0]
        if size not in self._sizes:
            self._sizes.append(size)
        return self._sizes.index(size)

    def _elements(self, node: fx.Node) -> list[int]:
        """Return positions of sizes, as ``_number`` does.

        These sizes added up are an upper bound of how many elements the node sums or counts.
        """
        named = arguments(node) if overload(node) is not None else {}
        tensors = [value for value in map(fake, node.all_input_nodes) if isinstance(value, Tensor)]
        dims = named.get("dim")
        if dims is None or dims == [] or len(tensors) != 1 or not tensors[0].dim():
            return [self._number(value.numel()) for value in tensors]
        sizes = [tensors[0].shape[dim] for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]
        return [self._number(math.prod(sizes))]

    def _step(self, node: fx.Node) -> "Step":
        value = fake(node)
        too_large = self._kept.reason(f"{op_name(node)} ({node.name})")
        if isinstance(value, (int, torch.SymInt)):
            place = self._number(value)
            return lambda known, numbers: None if self._kept.holds(numbers[place]) else too_large
        if node.op == "get_attr":
            owner = node.graph.owning_module
            assert owner is not None
            held = range_of(attribute(owner, str(node.target)))
            return lambda known, numbers: known.__setitem__(node, held)
        rule = self._rule(node)
        limits = self._kept.limits_of(value.dtype) if _is_whole(value) else None
        cut = _is_whole(value) and self._kept.cuts(value.dtype)

        def step(known: dict[fx.Node, Any], numbers: Sequence[Interval]) -> str | None:
            interval = rule(known, numbers)
            if limits is not None and (interval[0] < limits[0] or interval[1] > limits[1]):
                if cut:
                    return too_large
                interval = limits  # wrapped around, as in torch
            known[node] = interval
            return None

        return step

    def _rule(self, node: fx.Node) -> "Step":
        value = fake(node)
        if node.target is operator.getitem:
            whole, index = node.args[0], node.args[1]
            return lambda known, numbers: known[whole][index]  # pyright: ignore[reportArgumentType]
        name = _aten_name(node)
        keeps = name in KEEPS or (name == "index_put" and not arguments(node).get("accumulate"))
        keeps = keeps or (name in ("scatter", "scatter_reduce") and arguments(node).get("reduce") in _CHOOSES)
        operands = {} if overload(node) is None else self._operands(node, keeps)
        results = len(value) if isinstance(value, (list, tuple)) else 0
        low, high = self._kept.limits
        unknown = self._kept.limits_of(value.dtype) if _is_whole(value) else (low, high)
        if name in ORDERS and (results or len(operands) > 0):
            places = self._elements(node)

            def ordered(known: dict[fx.Node, Any], numbers: Sequence[Interval]) -> Any:
                every = hull(*_read(operands, known, numbers).values()) if operands else unknown
                return [every, (0, max(numbers[place][1] for place in places))] if results else every

            return ordered
        if _casts(node):
            places = self._elements(node) if name in ("sum", "cumsum") else []
            largest = self._kept.cast
            return lambda known, numbers: many(
                (-largest, largest), max([1, *(numbers[place][1] for place in places)])
            )
        if name == "scatter_reduce" and not keeps and arguments(node)["reduce"] not in ("sum", "mean"):
            return lambda known, numbers: (low - 1, high + 1)  # a product
        if name in ARITHMETIC and not keeps:
            places, function = self._elements(node), ARITHMETIC[name]
            return lambda known, numbers: function(
                {**_read(operands, known, numbers), "elements": sum(numbers[place][1] for place in places)}
            )
        if keeps:

            def kept(known: dict[fx.Node, Any], numbers: Sequence[Interval]) -> Any:
                every = hull((0, 1), *_read(operands, known, numbers).values())
                return [every] * results if results else every

            return kept
        return lambda known, numbers: [unknown] * results if results else unknown

    def _operands(self, node: fx.Node, keeps: bool) -> dict[str, list[Any]]:
        """Return parameter of the op -> its integers. An example for x * 2: {"self": [node], "other": [(2, 2)]}.

        An integer is a node, the position of a size (see ``_number``), or the interval of a fixed number.
        keeps: whether the op only selects elements. Then parameters that never give elements of the result, such as the
            indices of a gather, are left out."""
        operands: dict[str, list[Any]] = {}
        for name, argument in arguments(node).items():
            every = argument if isinstance(argument, (list, tuple)) else [argument]
            parts = [part for item in every if (part := self._part(item)) is not None]
            if keeps and name not in NUMBERS:
                parts = [part for part in parts if isinstance(part, fx.Node)]
            if parts and name not in ("dim", "dims") and not (keeps and name in PLACES):
                operands[name] = parts
        return operands

    def _part(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = fake(argument)
            if isinstance(value, (int, torch.SymInt)):
                return self._number(value)
            return argument if _is_whole(value) else None
        if isinstance(argument, (bool, int)):
            return (int(argument), int(argument))
        if isinstance(argument, float) and math.isfinite(argument):
            return (math.floor(argument), math.ceil(argument))
        return None


Step = Callable[[dict[fx.Node, Any], Sequence[Interval]], Any]
"""A function of the intervals of the nodes before it, and of the intervals of a call's sizes."""

_CHOOSES = (None, "amax", "amin")
"""The values of a scatter's ``reduce`` that select: each result is an element of an operand."""


def _read(
    operands: Mapping[str, list[Any]], known: Mapping[fx.Node, Any], numbers: Sequence[Interval]
) -> dict[str, Any]:
    def interval(part: Any) -> Interval:
        if isinstance(part, tuple):
            return part
        return numbers[part] if isinstance(part, int) else known[part]

    return {name: hull(*map(interval, parts)) for name, parts in operands.items()}


def _rounded(x: Interval) -> Interval:
    """Widen an interval: its lower end becomes 0 or -2**i, its upper end 0 or 2**j - 1."""
    low, high = x
    return -(1 << (-low).bit_length()) if low < 0 else 0, (1 << high.bit_length()) - 1 if high > 0 else 0


def _aten_name(node: fx.Node) -> str:
    """Return an aten op's name without its overload, another op's with its namespace, or "" for a node without op."""
    op = overload(node)
    return "" if op is None else op._schema.name.removeprefix("aten::")


def _is_whole(value: Any) -> TypeGuard[Tensor]:
    """Return whether a fake is a tensor of integers or bools."""
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def _casts(node: fx.Node) -> bool:
    """Return whether a node converts floats to integers."""
    first = next((fake(parent) for parent in node.all_input_nodes if isinstance(fake(parent), Tensor)), None)
    casts = _aten_name(node) in ("to", "_to_copy", "type_as", "sum", "cumsum")
    return casts and first is not None and first.is_floating_point()


def _has_whole(node: fx.Node) -> bool:
    value = fake(node)
    return any(map(_is_whole, value if isinstance(value, (list, tuple)) else [value]))


def _needed(graph: fx.Graph, kept: Kept) -> set[fx.Node]:
    """Return the nodes whose intervals are needed: arithmetic that may leave the engine's bits, and its operands."""
    needed: set[fx.Node] = set()
    waiting = [node for node in graph.nodes if node.op == "call_function" and _checked(node, kept)]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [parent for parent in node.all_input_nodes if _has_whole(parent)]
    return needed


def _checked(node: fx.Node, kept: Kept) -> bool:
    value, name = fake(node), _aten_name(node)
    if isinstance(value, torch.SymInt) and not name:
        return True  # arithmetic on sizes, with the engine's bits too
    if not name or not _is_whole(value) or not kept.cuts(value.dtype):
        return False
    return name in ARITHMETIC or name.startswith(("scatter", "index_put"))
