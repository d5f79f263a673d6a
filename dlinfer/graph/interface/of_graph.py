"""Derive the interface of a captured graph from the fakes of its inputs, its writes and its guards."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx

from dlinfer.errors import CaptureError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port, Range, bounds_of
from dlinfer.graph.ir.dialect import STATIC, fake, placed_memory, storages, tensor_or_none
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.torch_private.expressions import Expression, Size, SizeTextError, parse_size, to_size
from dlinfer.graph.torch_private.fake_mode import FakeTensorMode
from dlinfer.graph.torch_private.symbol_guards import conditions_of
from dlinfer.graph.torch_private.symbols import declared_range, fixed_size, size_range, symbols_of


def interface_of(
    graph: fx.Graph,
    mode: FakeTensorMode,
    called: Sequence[str],
    results: Sequence[str],
    declared: Mapping[Expression, Any],
) -> tuple[Interface, dict[object, str]]:
    """Return two things: the interface of a graph, and symbol -> the symbol's name in this interface.

    STATIC inputs are weights, so the interface does not list them.
    called: the module's names for the other inputs. results: the module's names for the outputs.
    declared: symbol -> the range that torch.export knows.
    Raises CaptureError if calls cannot check an input or a guard.
    """
    nodes = [node for node in graph.find_nodes(op="placeholder") if not node.meta.get(STATIC)]
    symbols = dict.fromkeys(symbol for node in nodes for symbol in symbols_of(fake(node)))
    names = {symbol: f"s{index}" for index, symbol in enumerate(symbols)}
    placed = set[int]().union(*map(placed_memory, graph.nodes))
    effects, inputs, constants = effects_of(graph), list[Port](), dict[int, object]()
    try:
        for place, (node, name) in enumerate(zip(nodes, called, strict=True)):
            if isinstance(fake(node), (torch.Tensor, torch.SymInt)):
                inputs.append(_port(node, name, names, placed, effects.is_written(node)))
            else:
                constants[place] = fake(node)
        conditions = tuple(conditions_of(mode, names))
    except SizeTextError as cause:
        raise _refusal(f"a size or guard cannot be checked at calls: {cause}") from cause
    limits = {name: declared_range(symbol, mode, declared) for symbol, name in names.items()}
    ranges: dict[str, Range] = {name: (low, high) for name, (low, high, _) in limits.items()}
    examples = {name: hint for name, (_, _, hint) in limits.items() if hint is not None}
    outputs = tuple(_outputs(graph, results, names, ranges))
    interface = Interface(tuple(inputs), outputs, ranges, conditions, constants, examples)
    for condition in conditions:
        if not set(condition.symbols) <= set(interface.places):
            raise _refusal(f"the graph is valid only while {condition}, but no input has these sizes")
    return interface, names


def _port(node: fx.Node, name: str, names: Mapping[Expression, str], placed: Set[int], written: bool) -> Port:
    value = fake(node)
    if isinstance(value, torch.SymInt):
        return Port.of_number(name, to_size(value, names), size_range(value))
    offset = strides = None
    if storages(node) & placed:
        offset = fixed_size(value.storage_offset())
        if offset is None:
            raise _refusal(f"input {node.name} is read at a storage offset that changes")
    if not is_contiguous(value):
        fixed = [fixed_size(stride) for stride in value.stride()]
        if None in fixed:
            raise _refusal(f"input {node.name} is not contiguous, and its strides are not fixed")
        strides = tuple(map(parse_size, fixed))
    sizes = tuple(to_size(size, names) for size in value.shape)
    bounds = tuple(map(size_range, value.shape))
    return Port(name, value.dtype, sizes, bounds, value.device, strides, offset, written=written)


def _outputs(
    graph: fx.Graph, names: Sequence[str], symbols: Mapping[Expression, str], ranges: Mapping[str, Range]
) -> Iterator[Port]:
    """Yield a port for each result of the graph that is a tensor. names: the names of all results."""
    results: Any = graph.output_node().args[0]
    for result, name in zip(results, names, strict=True):
        if (value := tensor_or_none(result)) is not None:
            sizes = tuple(_size(size, symbols) for size in value.shape)
            yield Port(name, value.dtype, sizes, bounds_of(sizes, ranges), value.device)


def _size(size: int | torch.SymInt, names: Mapping[Expression, str]) -> Size | None:
    try:
        return to_size(size, names)
    except SizeTextError:
        return None  # only a run determines the size


def _refusal(reason: str) -> CaptureError:
    return CaptureError(reason=reason, line="the call")
