"""Small functions as regions of the engine sophgo, without Dynamo before them."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from dlinfer.graph import torch_seam
from dlinfer.graph.capture import trace
from dlinfer.graph.dialect import STATIC
from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.extract import Subgraph
from dlinfer.graph.options import CompileOptions
from dlinfer.vendor.sophgo.engine import SophgoEngine

ENGINE = SophgoEngine()
"""One for all tests: what it has learnt of nodes is right for each of them."""


def subgraph(
    function: Callable[..., Any], *values: Any, static: Collection[int] = (), open_sizes: Collection[int] = ()
) -> Subgraph:
    """A function as a region. static: arguments that are weights. open_sizes: sizes that are symbols."""
    mode = torch_seam.fresh_mode()

    def twin(value: torch.Tensor) -> Any:
        kinds = [DimDynamic.DYNAMIC if size in open_sizes else DimDynamic.STATIC for size in value.shape]
        return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

    fakes = [twin(value) if isinstance(value, torch.Tensor) else value for value in values]
    captured = trace(lambda *given: pytree.tree_leaves(function(*given)), fakes, mode)
    graph = captured.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    for index, node in enumerate(placeholders):
        node.meta[STATIC] = index in static
    outputs: Any = graph.output_node().args[0]
    return Subgraph(captured.graph_module, tuple(placeholders), tuple(outputs))


def refused(region: Subgraph) -> dict[str, str]:
    """The reasons of the nodes that the engine does not take, by op."""
    nodes = region.graph_module.graph.nodes
    return {str(node.target): reason for node in nodes if (reason := ENGINE.refuses(node)) is not None}


def compiled(
    function: Callable[..., Any],
    *values: Any,
    static: Collection[int] = (),
    open_sizes: Collection[int] = (),
    fallback: str = "error",
    **options: Any,
) -> CompiledRegion:
    """A function compiled by the engine, which must take every node of it. options: the engine's own."""
    region = subgraph(function, *values, static=static, open_sizes=open_sizes)
    reasons = refused(region)
    assert not reasons, reasons
    return ENGINE.compile(region, CompileOptions(engine="sophgo", fallback=fallback, engine_options=options))


def relative(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative L2 distance, in float64."""
    difference = given.double() - wanted.double()
    return (difference.norm() / wanted.double().norm().clamp_min(1e-30)).item()
