"""What of a compiled graph is kept in an artifact: plain data and the tensors that it reads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dlinfer.graph.capture.export import Exported
from dlinfer.graph.capture.trace import Captured
from dlinfer.graph.codec.arguments import CodecError
from dlinfer.graph.codec.graph import write_graph
from dlinfer.graph.engine import Engine, Payload
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.torch_private.expressions import SizeTextError, to_size
from dlinfer.graph.torch_private.symbols import symbols_of


@dataclass(frozen=True)
class Stage:
    """One graph of an entry: a shape profile of it.

    graph: its written form. tensors: its weights and constants, by the numbers that the graph calls them.
    engine_options: what the engine was told, as far as it is to be told so again.
    outputs: name, dtype, sizes and device of each tensor that it gives; of None, numbers and text the name alone.
    """

    model: str
    engine: str
    small_regions: bool
    graph: dict[str, Any]
    tensors: Sequence[torch.Tensor]
    engine_options: dict[str, Any]
    outputs: list[dict[str, Any]]


class Storable(Protocol):
    """A compiled graph and the form in which it is saved, or why it has none."""

    stored: Stage | str
    run: CompiledGraph


def keep(exported: Exported, engine: Engine, options: CompileOptions, model: str) -> Stage | str:
    """Return the stage to store of a graph after its passes, or why it cannot be stored."""
    graph_module = exported.captured.graph_module
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in exported.weights):
        return "a weight is of a class of its own"
    try:
        file = write_graph(graph_module, len(exported.weights), exported.ranges)
    except CodecError as cause:
        return str(cause)
    outputs = _outputs(exported.captured, exported.names)
    _name_inputs(file.data["inputs"], exported.inputs)
    tensors = [*exported.weights, *file.constants]
    told = {
        name: value for name, value in options.wanted_engine_options.items() if name in engine.stored_options
    }
    return Stage(model, engine.name, options.keeps_small_regions, file.data, tensors, told, outputs)


def _name_inputs(written: Iterable[dict[str, Any]], names: Iterable[str]) -> None:
    """Say what the module calls an input, where its node has another name."""
    for item, name in zip([item for item in written if "weight" not in item], names, strict=True):
        if name != item["name"] and "fixed" not in item:
            item["called"] = name


def _outputs(captured: Captured, names: Sequence[str]) -> list[dict[str, Any]]:
    symbols = dict.fromkeys(symbol for value in captured.fakes for symbol in symbols_of(value))
    known = {symbol: f"s{index}" for index, symbol in enumerate(symbols)}
    nodes: Any = captured.graph_module.graph.output_node().args[0]
    return [_output(node, name, known) for node, name in zip(nodes, names, strict=True)]


def _output(node: Any, name: str, known: Mapping[Any, str]) -> dict[str, Any]:
    value = fake(node) if isinstance(node, torch.fx.Node) else node
    if not isinstance(value, torch.Tensor):
        return {"name": name}
    return {
        "name": name,
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
        "sizes": [_size(size, known) for size in value.shape],
    }


def _size(size: int | torch.SymInt, known: Mapping[Any, str]) -> int | str | None:
    try:
        return size if isinstance(size, int) else str(to_size(size, known))
    except SizeTextError:
        return None  # only running it tells


def payloads_of(compiled: CompiledGraph) -> dict[str, Payload]:
    """Return what the engine keeps of a graph's regions, by their names."""
    found = {name: compiled.engine.payload(part) for name, part in compiled.parts.items()}
    return {name: payload for name, payload in found.items() if payload is not None}
