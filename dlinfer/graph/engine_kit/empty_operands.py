"""Operands that turn out to have no elements, of ops that an engine is not right for then: asked before each call."""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from dlinfer import ops
from dlinfer.graph.engine_kit.output_sizes import reader, sizes_of
from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.ir.dialect import fake, op_name
from dlinfer.graph.torch_private.symbols import lowest_size

Shapes = Callable[[fx.Node], Iterable[Sequence[Any]]]
"""Of a node: lists of sizes, none of which may be 0."""


_aten = torch.ops.aten
_PRODUCTS = (
    *(_aten.linear, _aten.mm, _aten.bmm, _aten.matmul, _aten.mv, _aten.dot, _aten.vdot, _aten.addmm),
    *(_aten.addmv, _aten.baddbmm, ops.linear.overload.overloadpacket),
)
_FACTORS = ("mat1", "mat", "batch1", "input", "x", "self")


def first_factor(packet: Any, given: Collection[str]) -> str | None:
    """Of a product of matrices, by the names of its arguments: that whose last dimension is summed over."""
    if packet not in _PRODUCTS:
        return None
    return next(name for name in _FACTORS if name in given)  # self is an addend where there is another


class EmptyOperands:
    """Callable with a call's inputs: raises RefusedError where an operand is empty that must not be."""

    def __init__(self, graph: fx.Graph, shapes: Shapes) -> None:
        """Raises UnknownSizeError for a size that does not follow from the inputs."""
        self._names: list[str] = []
        sizes: list[Sequence[Any]] = []
        for node in graph.nodes:
            for shape in shapes(node):
                open_ = [size for size in shape if lowest_size(size) <= 0]
                if open_:
                    self._names.append(op_name(node))
                    sizes.append(open_)
        inputs = [fake(node) for node in graph.find_nodes(op="placeholder")]
        self._sizes = reader(sizes_of(sizes, inputs)) if sizes else None

    def __call__(self, inputs: Sequence[Any]) -> None:
        if self._sizes is None:
            return
        for name, sizes in zip(self._names, self._sizes(inputs), strict=True):
            if not prod(sizes):
                raise RefusedError(without_elements(name))


def without_elements(name: str) -> str:
    """Why an op of this name is refused."""
    return f"{name} of a tensor without elements"
