"""A check before each call, for ops that an engine computes wrongly if an operand has no elements."""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod

import torch
from torch import fx

from dlinfer import ops
from dlinfer.graph.engine_kit.output_sizes import reader, sizes_of
from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.ir.dialect import fake, op_name
from dlinfer.graph.ir.program import Inputs
from dlinfer.graph.torch_private.symbols import size_range

Shapes = Callable[[fx.Node], Iterable[Sequence[int | torch.SymInt]]]
"""A function from a node to the shapes of the operands that must have elements."""


_aten = torch.ops.aten
_PRODUCTS = (
    *(_aten.linear, _aten.mm, _aten.bmm, _aten.matmul, _aten.mv, _aten.dot, _aten.vdot, _aten.addmm),
    *(_aten.addmv, _aten.baddbmm, ops.linear.overload.overloadpacket),
)
_FACTORS = ("mat1", "mat", "batch1", "input", "x", "self")


def first_factor(packet: object, names: Collection[str]) -> str | None:
    """Return the parameter name of the first factor if ``packet`` is a matrix product; None for other ops.

    names: the op's parameter names.
    """
    if packet not in _PRODUCTS:
        return None
    return next(name for name in _FACTORS if name in names)  # in addmm and the like, ``self`` is an addend


class EmptyOperands:
    """A check of a call's inputs. It raises RefusedError if an operand without elements would give a wrong result."""

    def __init__(self, graph: fx.Graph, shapes: Shapes) -> None:
        """Find the sizes that each call must check.

        shapes: returns, for each node, the shapes of the operands that must have elements.
        Raises UnknownSizeError if a size of such an operand cannot be computed from the inputs.
        """
        self._names: list[str] = []
        sizes: list[Sequence[int | torch.SymInt]] = []
        for node in graph.nodes:
            for shape in shapes(node):
                open_ = [size for size in shape if size_range(size)[0] <= 0]
                if open_:
                    self._names.append(op_name(node))
                    sizes.append(open_)
        inputs = [fake(node) for node in graph.find_nodes(op="placeholder")]
        self._sizes = reader(sizes_of(sizes, inputs)) if sizes else None

    def __call__(self, inputs: Inputs) -> None:
        if self._sizes is None:
            return
        for name, sizes in zip(self._names, self._sizes(inputs), strict=True):
            if not prod(sizes):
                raise RefusedError(without_elements(name))


def without_elements(name: str) -> str:
    return f"{name} gets a tensor without elements"
