"""The interface that a captured graph asks for: read from the fakes of its inputs, its effects and its guards."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx

from dlinfer.errors import CaptureError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port, Range
from dlinfer.graph.ir.device import HOST
from dlinfer.graph.ir.dialect import STATIC, fake, placed_memory, storages
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.torch_private.expressions import Size, SizeTextError, parse_size, to_size
from dlinfer.graph.torch_private.fake_mode import FakeTensorMode
from dlinfer.graph.torch_private.guards import conditions_of
from dlinfer.graph.torch_private.symbols import fixed_size, size_range, symbols_of


def interface_of(graph: fx.Graph, mode: FakeTensorMode, called: Sequence[str]) -> Interface:
    """What a graph takes besides its weights, which are its STATIC inputs.

    called: what the module calls each of these inputs. Raises CaptureError where they cannot be checked at a call.
    """
    nodes = [node for node in graph.find_nodes(op="placeholder") if not node.meta.get(STATIC)]
    symbols = dict.fromkeys(symbol for node in nodes for symbol in symbols_of(fake(node)))
    names = {symbol: f"s{index}" for index, symbol in enumerate(symbols)}
    placed = set[int]().union(*map(placed_memory, graph.nodes))
    written, inputs, constants = effects_of(graph), list[Port](), dict[int, Any]()
    try:
        for place, (node, name) in enumerate(zip(nodes, called, strict=True)):
            if not isinstance(fake(node), (torch.Tensor, torch.SymInt)):
                constants[place] = fake(node)
                continue
            inputs.append(_port(node, name, names, placed, written.is_written(node)))
        conditions = tuple(conditions_of(mode, names))
    except SizeTextError as cause:
        raise CaptureError(
            reason=f"a size or guard that calls cannot check: {cause}", line="the call"
        ) from cause
    ranges: dict[str, Range] = {}
    for port in inputs:
        for size, bounds in zip(port.sizes, port.bounds, strict=True):
            if size is not None and size.symbol is not None:
                ranges.setdefault(size.symbol, bounds)
    for condition in conditions:
        if not set(condition.symbols) <= set(ranges):
            raise CaptureError(
                reason=f"it holds only while {condition}, which no input shows", line="the call"
            )
    return Interface(tuple(inputs), symbols=ranges, conditions=conditions, constants=constants)


def _port(node: fx.Node, name: str, names: Mapping[Any, str], placed: Set[int], written: bool) -> Port:
    value = fake(node)
    if isinstance(value, torch.SymInt):
        bounds = (size_range(value),)
        return Port(name, torch.int64, (to_size(value, names),), bounds, torch.device(HOST), number=True)
    offset = None
    if storages(node) & placed:
        offset = fixed_size(value.storage_offset())
        if offset is None:
            raise CaptureError(reason=f"input {node.name} is read by a place that changes", line="the call")
    return Port(
        name,
        value.dtype,
        tuple(to_size(size, names) for size in value.shape),
        tuple(map(size_range, value.shape)),
        value.device,
        None if is_contiguous(value) else _strides(node, value),
        offset,
        written=written,
    )


def _strides(node: fx.Node, value: torch.Tensor) -> tuple[Size, ...]:
    strides = tuple(fixed_size(stride) for stride in value.stride())
    if None in strides:
        reason = f"input {node.name} is neither contiguous nor of fixed strides"
        raise CaptureError(reason=reason, line="the call")
    return tuple(map(parse_size, strides))
