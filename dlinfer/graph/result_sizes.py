"""The sizes of a graph's results, computed from the inputs of a call: what memory to give an engine to write into."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dlinfer.graph.dialect import fake
from dlinfer.graph.torch_seam import free_symbols, number_node, plain_symbol


def result_sizes(graph_module: fx.GraphModule) -> Callable[..., list[list[int]]]:
    """A function of the graph's inputs that gives the sizes of each of its tensor results.

    Every symbol in a result's sizes is an input or one of the sizes of one, as ``extract`` sees to.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    results: Sequence[Any] = graph_module.graph.output_node().args[0]  # pyright: ignore[reportAssignmentType]
    shapes = [list(fake(node).shape) for node in results]
    graph = fx.Graph()
    inputs = [graph.placeholder(f"i{index}") for index in range(len(placeholders))]
    wanted = {symbol for shape in shapes for size in shape for symbol in free_symbols(size)}
    symbols = _symbols(graph, inputs, [fake(node) for node in placeholders], wanted)
    made: dict[str, Any] = {}

    def number(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        if str(size) not in made:
            made[str(size)] = number_node(graph, size, symbols)
        return made[str(size)]

    graph.output([[number(size) for size in shape] for shape in shapes])
    return fx.GraphModule({}, graph, "result_sizes").forward


def _symbols(
    graph: fx.Graph, inputs: Sequence[fx.Node], fakes: Sequence[Any], wanted: set[Any]
) -> dict[Any, fx.Node]:
    """A node for each symbol: an input, or the size of one."""
    found: dict[Any, fx.Node] = {}
    for node, value in zip(inputs, fakes, strict=True):
        if plain_symbol(value) in wanted:
            found.setdefault(plain_symbol(value), node)
    for node, value in zip(inputs, fakes, strict=True):
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            symbol = plain_symbol(size)
            if symbol in wanted and symbol not in found:
                found[symbol] = graph.call_method("size", (node, dim))
    return found
