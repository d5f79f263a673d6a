"""Keeping memory layouts: an op that returns contiguous tensors in place of elementwise ones that kept strides.

HF keeps q as [batch, heads, tokens, size] that lies in memory as [batch, tokens, heads, size]. Elementwise ops keep
that; dlinfer's ops return new contiguous tensors. So a rule shows an op its input in the order it lies in memory
and the result in the model's order: two views and no copy, and later ``view`` calls still fit.
"""

from itertools import combinations

import torch
from torch import fx

from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.ir.layout import is_dense
from dlinfer.graph.passes.fusion.match import aten, calls, is_tensor
from dlinfer.graph.passes.rewriter import Rewriter

Swap = tuple[int, int] | None
"""Two dimensions to exchange; None for none."""


def contiguous_after(value: torch.Tensor) -> tuple[bool, Swap]:
    """(found, swap): which exchange of two dimensions, none or one, makes a fake tensor contiguous.

    The last dimension stays last. ``found`` is False when no exchange certainly does.
    """
    swaps: list[Swap] = [None, *combinations(range(value.dim() - 1), 2)]
    return next(((True, swap) for swap in swaps if fits(value, swap)), (False, None))


def fits(value: torch.Tensor, swap: Swap) -> bool:
    """Whether a fake tensor is certainly contiguous after the exchange."""
    order = list(range(value.dim()))
    if swap is not None:
        order[swap[0]], order[swap[1]] = order[swap[1]], order[swap[0]]
    return is_dense(value, order)


def swapped(rewriter: Rewriter, at: fx.Node, node: fx.Node, swap: Swap) -> fx.Node:
    """``node`` with two dimensions exchanged. An exchange that the node itself made is undone instead."""
    if swap is None:
        return node
    if calls(node, aten.transpose.int) and is_tensor(node.args[0]):
        rank = fake(node).dim()
        made = {dim % rank for dim in node.args[1:3] if isinstance(dim, int)}
        if made == set(swap):
            return node.args[0]
    return rewriter.call(at, aten.transpose.int, node, *swap)


def cast(rewriter: Rewriter, at: fx.Node, node: fx.Node, dtype: object) -> fx.Node:
    """``node`` in another dtype; itself where it has that."""
    if fake(node).dtype is dtype:
        return node
    return rewriter.call(at, aten.to.dtype, node, dtype)
