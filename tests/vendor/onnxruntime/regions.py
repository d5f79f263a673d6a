"""Small functions as regions of the engine onnxruntime."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.vendor.onnxruntime.engine import OnnxRuntimeEngine
from tests.vendor.regions import compiled_by, refused_by, region_of

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

    def is_open(index: int, size: int) -> bool:
        return not fixed and index not in static and size not in numbers

    return region_of(function, values, is_open, static)


def refused(region: Subgraph) -> dict[str, str]:
    """The reasons of the nodes that the engine does not take, by op."""
    return refused_by(ENGINE, region)


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
    return compiled_by(ENGINE, region, fallback, options)


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
