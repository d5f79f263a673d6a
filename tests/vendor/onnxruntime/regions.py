"""Small functions as regions of the engine, without Dynamo before them."""

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
from dlinfer.vendor.onnxruntime.engine import OnnxRuntimeEngine

ENGINE = OnnxRuntimeEngine()
"""One for all tests: what it has learnt of nodes is right for each of them."""


def subgraph(
    function: Callable[..., Any],
    *values: Any,
    static: Collection[int] = (),
    fixed: bool = False,
    numbers: Collection[int] = (),
) -> Subgraph:
    """A function as a region. Sizes of tensors above 1 are symbols, but of those named in ``static`` (weights).

    fixed: every size is a number. numbers: sizes that are numbers wherever they stand.
    """
    mode = torch_seam.fresh_mode()

    def twin(index: int, value: torch.Tensor) -> Any:
        kinds = [DimDynamic.STATIC if size in numbers else DimDynamic.DYNAMIC for size in value.shape]
        if fixed or index in static:
            kinds = [DimDynamic.STATIC] * value.dim()
        return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

    fakes = [
        twin(index, value) if isinstance(value, torch.Tensor) else value for index, value in enumerate(values)
    ]
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
    fixed: bool = False,
    numbers: Collection[int] = (),
    fallback: str = "error",
    **options: Any,
) -> CompiledRegion:
    """A function compiled by the engine, which must take every node of it. options: the engine's own."""
    region = subgraph(function, *values, static=static, fixed=fixed, numbers=numbers)
    reasons = refused(region)
    assert not reasons, reasons
    chosen = CompileOptions(engine="onnxruntime", fallback=fallback, engine_options=options)
    return ENGINE.compile(region, chosen)


def as_in_eager(
    run: Callable[..., Any], function: Callable[..., Any], *values: Any, tolerance: float = 1e-5
) -> None:
    """Call both, each on tensors of its own, and compare results and arguments."""
    ours = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    theirs = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    with torch.no_grad():
        given, expected = run(*ours), pytree.tree_leaves(function(*theirs))
    torch.testing.assert_close(list(given), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
