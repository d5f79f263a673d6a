"""Small functions as regions of the engine sophgo."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.vendor.sophgo.engine.engine import SophgoEngine
from tests.vendor.regions import compiled_by, refused_by, region_of

ENGINE = SophgoEngine()
"""One for all tests: what it has learnt of nodes is right for each of them."""


def subgraph(
    function: Callable[..., Any], *values: Any, static: Collection[int] = (), open_sizes: Collection[int] = ()
) -> Subgraph:
    """A function as a region. static: arguments that are weights. open_sizes: sizes that are symbols."""
    return region_of(function, values, lambda _, size: size in open_sizes, static)


def refused(region: Subgraph) -> dict[str, str]:
    """The reasons of the nodes that the engine does not take, by op."""
    return refused_by(ENGINE, region)


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
    return compiled_by(ENGINE, region, fallback, options)


def relative(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative L2 distance, in float64."""
    difference = given.double() - wanted.double()
    return (difference.norm() / wanted.double().norm().clamp_min(1e-30)).item()
