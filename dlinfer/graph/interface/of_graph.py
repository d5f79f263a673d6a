"""Derive the interface of a captured graph from the fakes of its inputs, its effects and its guards."""

from collections.abc import Mapping, Sequence, Set

import torch
from torch import fx

from dlinfer.errors import CaptureError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port, Range
from dlinfer.graph.ir.dialect import STATIC, fake, placed_memory, storages
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.torch_private.expressions import Expression, SizeTextError, parse_size, to_size
from dlinfer.graph.torch_private.fake_mode import FakeTensorMode
from dlinfer.graph.torch_private.symbol_guards import conditions_of
from dlinfer.graph.torch_private.symbols import fixed_size, size_range, symbols_of


def interface_of(graph: fx.Graph, mode: FakeTensorMode, called: Sequence[str]) -> Interface:
    """Return the interface of a graph. Its STATIC inputs are weights, which have no ports.

    called: the module's names for the other inputs. Raises CaptureError if a call cannot check an input or a guard.
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
        raise _refusal(f"a size or guard that calls cannot check: {cause}") from cause
    ranges: dict[str, Range] = {}
    for port in inputs:
        for size, bounds in zip(port.sizes, port.bounds, strict=True):
            if size is not None and size.symbol is not None:
                ranges.setdefault(size.symbol, bounds)
    for condition in conditions:
        if not set(condition.symbols) <= set(ranges):
            raise _refusal(f"it holds only while {condition}, which no input shows")
    return Interface(tuple(inputs), symbols=ranges, conditions=conditions, constants=constants)


def _port(node: fx.Node, name: str, names: Mapping[Expression, str], placed: Set[int], written: bool) -> Port:
    value = fake(node)
    if isinstance(value, torch.SymInt):
        return Port.of_number(name, to_size(value, names), size_range(value))
    offset = strides = None
    if storages(node) & placed:
        offset = fixed_size(value.storage_offset())
        if offset is None:
            raise _refusal(f"input {node.name} is read by a place that changes")
    if not is_contiguous(value):
        fixed = [fixed_size(stride) for stride in value.stride()]
        if None in fixed:
            raise _refusal(f"input {node.name} is neither contiguous nor of fixed strides")
        strides = tuple(map(parse_size, fixed))
    sizes = tuple(to_size(size, names) for size in value.shape)
    bounds = tuple(map(size_range, value.shape))
    return Port(name, value.dtype, sizes, bounds, value.device, strides, offset, written=written)


def _refusal(reason: str) -> CaptureError:
    return CaptureError(reason=reason, line="the call")
