"""Insert an assertion before each ``select`` with an index from data (``item()``): the index is in bounds.

torch's kernel raises for an index out of bounds. An engine only computes the offset, and would read past the tensor.
The same is done for ``select_scatter``.
"""

import operator

import torch
from torch import fx

from dlinfer.graph.ir.dialect import arguments, fake, model_line
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.rewriter import Edit, Rewriter
from dlinfer.graph.torch_private.symbols import free_unbacked_symbols

_aten = torch.ops.aten
_BY_INDEX = (_aten.select.int, _aten.select_scatter.default)


def _run(graph_module: fx.GraphModule) -> list[Edit]:
    rewriter = Rewriter(graph_module)
    checked: set[tuple[fx.Node, fx.Node, int]] = set()
    for node in list(graph_module.graph.nodes):
        if node.target not in _BY_INDEX:
            continue
        call = arguments(node)
        index, source, dim = key = call["index"], call["self"], call["dim"]
        if isinstance(index, fx.Node) and free_unbacked_symbols(fake(index)) and key not in checked:
            checked.add(key)
            _check(rewriter, node, index, source, dim)
    return rewriter.edits


def _check(rewriter: Rewriter, at: fx.Node, index: fx.Node, source: fx.Node, dim: int) -> None:
    size = rewriter.call(at, _aten.sym_size.int, source, dim % fake(source).dim())
    lowest = rewriter.call(at, operator.neg, size)
    bounds = rewriter.call(at, operator.ge, index, lowest), rewriter.call(at, operator.lt, index, size)
    # typeshed has no types for this operator.
    inside = rewriter.call(at, operator.and_, *bounds)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    said = f"select(): index {index.name} is out of range of dimension {dim}"
    node = rewriter.call(at, _aten._assert_scalar.default, inside, said)
    rewriter.edits.append(Edit(said, (), (node.name,), model_line(node)))


SELECT_BOUNDS = Pass(
    "select_bounds", "engines compute the offset of a view without a bounds check", _run, always=True
)
