"""Recognise views by their strides and offsets, whichever ops the model uses.

Offsets, sizes and strides of fakes show that two tensors are the halves of a third, or that one is the transpose of
another. So chunk, split, slice, narrow, unflatten and unbind need no patterns.
"""

from collections.abc import Iterator
from itertools import takewhile

from torch import fx

from dlinfer.graph.ir.dialect import is_view, tensor_or_none, tensors_of
from dlinfer.graph.ir.layout import is_static, same_size, same_sizes


def seen_through(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node and the nodes that it is a view of, nearest first, up to the node that allocated the memory.

    The list that ``chunk`` returns counts as a view too.
    """
    while True:
        yield node
        if not is_view(node):
            return
        parents = [parent for parent in node.all_input_nodes if tensors_of(parent)]
        if len(parents) != 1:
            return
        node = parents[0]


def views_between(view: fx.Node, whole: fx.Node) -> tuple[fx.Node, ...]:
    """Return ``view`` and the views between it and ``whole``, without ``whole``."""
    return tuple(takewhile(lambda node: node is not whole, seen_through(view)))


def are_transposed(left: fx.Node, right: fx.Node, dim: int, with_dim: int) -> bool:
    """Return whether two views of the same memory differ by a swap of two dimensions, counted from the front."""
    first, second = tensor_or_none(left), tensor_or_none(right)
    if first is None or second is None or first.dim() != second.dim() or first.dim() <= max(dim, with_dim):
        return False
    order = list(range(first.dim()))
    order[dim], order[with_dim] = with_dim, dim
    return (
        first.dtype is second.dtype
        and same_sizes([first.shape[index] for index in order], second.shape)
        and same_sizes([first.stride(index) for index in order], second.stride())
        and same_size(first.storage_offset(), second.storage_offset())
    )


def halves(first: fx.Node, second: fx.Node) -> fx.Node | None:
    """Return the node x if the two nodes are ``x[..., :n]`` and ``x[..., n:]``, its halves; else None."""
    return _cut_from(first, second, None, 1)


def evens_and_odds(even: fx.Node, odd: fx.Node) -> fx.Node | None:
    """Return the node x if the two nodes are ``x[..., 0::2]`` and ``x[..., 1::2]``; else None."""
    return _cut_from(even, odd, 1, 2)


def _cut_from(first: fx.Node, second: fx.Node, start: int | None, step: int) -> fx.Node | None:
    """Return the node that both parts are cut from along the last dimension; None if there is none.

    start: the index of the second part's beginning. None means that it begins where the first part ends.
    step: the step of both parts.
    """
    wholes = set(seen_through(second))
    for whole in seen_through(first):
        if whole in wholes and _is_part(first, whole, 0, step) and _is_part(second, whole, start, step):
            return whole
    return None


def _is_part(part: fx.Node, whole: fx.Node, start: int | None, step: int) -> bool:
    small, large = tensor_or_none(part), tensor_or_none(whole)
    if small is None or large is None or small.dtype is not large.dtype or small.dim() != large.dim():
        return False
    if small.dim() == 0 or not is_static(small.shape[-1]):
        return False
    size, stride = small.shape[-1], large.stride(-1)
    offset = large.storage_offset() + (size if start is None else start) * stride
    return (
        same_size(2 * size, large.shape[-1])
        and same_sizes(small.shape[:-1], large.shape[:-1])
        and same_sizes(small.stride(), (*large.stride()[:-1], step * stride))
        and same_size(small.storage_offset(), offset)
    )
