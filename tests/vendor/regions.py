"""Small functions as regions of an engine, without Dynamo before them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from dlinfer.graph.capture.trace import trace
from dlinfer.graph.engine import CompiledRegion, Engine
from dlinfer.graph.ir.dialect import STATIC
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.torch_private import fake_mode


def region_of(
    function: Callable[..., Any],
    values: Sequence[Any],
    is_open: Callable[[int, int], bool],
    static: Collection[int] = (),
) -> Subgraph:
    """A function as a region.

    is_open: of an argument's number and a size of it, whether that size is a symbol. static: numbers of the arguments
    that are weights.
    """
    mode = fake_mode.fresh_mode()

    def twin(index: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        kinds = [DimDynamic.DYNAMIC if is_open(index, size) else DimDynamic.STATIC for size in value.shape]
        return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

    fakes = [twin(index, value) for index, value in enumerate(values)]
    captured = trace(lambda *given: pytree.tree_leaves(function(*given)), fakes, mode)
    graph = captured.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    for index, node in enumerate(placeholders):
        node.meta[STATIC] = index in static
    outputs: Any = graph.output_node().args[0]
    return Subgraph(captured.graph_module, tuple(placeholders), tuple(outputs))


def refused_by(engine: Engine, region: Subgraph) -> dict[str, str]:
    """The reasons of the nodes that the engine does not take, by op."""
    nodes = region.graph_module.graph.nodes
    return {str(node.target): reason for node in nodes if (reason := engine.refuses(node)) is not None}


def compiled_by(engine: Engine, region: Subgraph, fallback: str, options: dict[str, Any]) -> CompiledRegion:
    """A region compiled by the engine, which must take every node of it. options: the engine's own."""
    reasons = refused_by(engine, region)
    assert not reasons, reasons
    chosen = CompileOptions(engine=engine.name, fallback=fallback, engine_options=options)
    return engine.compile(region, chosen)
