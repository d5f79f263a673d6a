"""Keep memory layouts in fusion rules: a fused op returns contiguous tensors, but elementwise ops keep strides.

HF's q is [batch, heads, tokens, size] with the strides of [batch, tokens, heads, size]. A rule transposes q into its
order in memory, and transposes the fused result back. The two transpositions are views. The final result has the
strides that elementwise ops would return, so later ``view`` calls still work.
"""

from itertools import combinations

import torch
from torch import fx

from dlinfer.graph.ir.layout import is_dense
from dlinfer.graph.passes.fusion.match import aten, calls, dtype_of, is_tensor, rank_of, widened_from
from dlinfer.graph.passes.rewriter import Rewriter

Swap = tuple[int, int] | None
"""Two dimensions to transpose; None for no transposition."""


def contiguous_after(value: torch.Tensor) -> tuple[bool, Swap]:
    """Return (True, swap) if the transposition ``swap`` certainly makes a fake tensor contiguous.

    Return (False, None) if no transposition certainly does. The last dimension stays in place.
    """
    swaps: list[Swap] = [None, *combinations(range(value.dim() - 1), 2)]
    return next(((True, swap) for swap in swaps if fits(value, swap)), (False, None))


def fits(value: torch.Tensor, swap: Swap) -> bool:
    """Return whether a fake tensor is certainly contiguous after a transposition."""
    order = list(range(value.dim()))
    if swap is not None:
        order[swap[0]], order[swap[1]] = order[swap[1]], order[swap[0]]
    return is_dense(value, order)


def swapped(rewriter: Rewriter, at: fx.Node, node: fx.Node, swap: Swap) -> fx.Node:
    """Return a node that transposes two dimensions of ``node``.

    If ``node`` itself is a transposition of the same dimensions, return its argument.
    """
    if swap is None:
        return node
    if calls(node, aten.transpose.int) and is_tensor(node.args[0]):
        dims = {dim % rank_of(node) for dim in node.args[1:3] if isinstance(dim, int)}
        if dims == set(swap):
            return node.args[0]
    return rewriter.call(at, aten.transpose.int, node, *swap)


def in_dtype(dtype: torch.dtype, *nodes: fx.Node) -> fx.Node:
    """Return a cast to ``dtype`` that the graph already has. If there is none, return the last of ``nodes`` uncast.

    All ``nodes`` have the same value, so an existing cast saves a new one. The cast may be one of ``nodes``, or one of
    the exact casts above them.
    """
    casts = (cast for node in nodes for cast in widened_from(node)[1])
    return next((cast for cast in casts if dtype_of(cast) is dtype), nodes[-1])


def cast(rewriter: Rewriter, at: fx.Node, node: fx.Node, dtype: object) -> fx.Node:
    return node if dtype_of(node) is dtype else rewriter.call(at, aten.to.dtype, node, dtype)
