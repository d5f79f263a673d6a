"""The part of a compiled graph that an artifact stores: plain data and the tensors that the graph reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dlinfer.graph.capture.export import Exported
from dlinfer.graph.codec.arguments import CodecError
from dlinfer.graph.codec.graph import write_graph
from dlinfer.graph.engine import Engine
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port, Range, bounds_of
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.torch_private.expressions import Size, SizeTextError, to_size
from dlinfer.graph.torch_private.symbols import declared_range, symbols_of


@dataclass(frozen=True)
class Stage:
    """One graph of an entry: a shape profile of it.

    graph: its written form. tensors: its weights and constants, by the numbers that the graph calls them.
    engine_options: those that are stored. results: the name of each; ``interface`` describes those that are tensors.
    """

    model: str
    engine: str
    small_regions: bool
    graph: dict[str, Any]
    tensors: Sequence[torch.Tensor]
    engine_options: dict[str, Any]
    results: list[str]
    interface: Interface


class Storable(Protocol):
    """A compiled graph with what ``save`` writes of it, or why it cannot be saved."""

    stored: Stage | str
    run: CompiledGraph


def keep(
    exported: Exported, interface: Interface, engine: Engine, options: CompileOptions, model: str
) -> Stage | str:
    """Return the stage to store of a graph after its passes, or why it cannot be stored."""
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in exported.weights):
        return "a weight is of a class of its own"
    interface = stored_interface(interface, exported)
    try:
        file = write_graph(exported.captured.graph_module, interface)
    except CodecError as cause:
        return str(cause)
    tensors = [*exported.weights, *file.constants]
    stored = {
        name: value for name, value in options.wanted_engine_options.items() if name in engine.stored_options
    }
    small_regions = options.keeps_small_regions
    return Stage(model, engine.name, small_regions, file.data, tensors, stored, exported.names, interface)


def stored_interface(interface: Interface, exported: Exported) -> Interface:
    """The interface with its outputs, and with the symbols' ranges and examples as torch.export was told them."""
    captured = exported.captured
    symbols = dict.fromkeys(symbol for value in captured.fakes for symbol in symbols_of(value))
    names = {symbol: f"s{index}" for index, symbol in enumerate(symbols)}
    ranges = {name: declared_range(symbol, captured.mode, exported.ranges) for symbol, name in names.items()}
    results: Any = captured.graph_module.graph.output_node().args[0]
    values = [fake(node) if isinstance(node, torch.fx.Node) else node for node in results]
    limits: dict[str, Range] = {name: (low, high) for name, (low, high, _) in ranges.items()}
    return replace(
        interface,
        outputs=tuple(
            _output(value, name, names, limits)
            for value, name in zip(values, exported.names, strict=True)
            if isinstance(value, torch.Tensor)
        ),
        symbols=limits,
        examples={name: hint for name, (_, _, hint) in ranges.items() if hint is not None},
    )


def _output(value: torch.Tensor, name: str, names: Mapping[Any, str], ranges: Mapping[str, Range]) -> Port:
    sizes = tuple(_size(size, names) for size in value.shape)
    return Port(name, value.dtype, sizes, bounds_of(sizes, ranges), value.device)


def _size(size: int | torch.SymInt, names: Mapping[Any, str]) -> Size | None:
    try:
        return to_size(size, names)
    except SizeTextError:
        return None  # only running it tells
