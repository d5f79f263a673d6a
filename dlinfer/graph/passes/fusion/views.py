"""Recognising views by what they show, not by how they are spelled.

A fake tensor knows its place in memory. That two tensors are the halves of a third, or that one repeats the heads
of another, can be read off offsets, sizes and strides, so one question replaces a list of spellings (chunk, split,
slice, narrow, unflatten and unbind, ...).
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.dialect import fake, is_view, tensors_of
from dlinfer.graph.ir.layout import same_size, same_sizes


def tensor(node: Any) -> torch.Tensor | None:
    """The fake of a node whose result is one tensor; None for anything else."""
    value = fake(node) if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def shown(node: fx.Node) -> torch.Tensor:
    """The fake of a node that is known to give one tensor."""
    value = fake(node)
    assert isinstance(value, torch.Tensor), node.format_node()
    return value


def seen_through(node: fx.Node) -> Iterator[fx.Node]:
    """A node and what it is a view of, nearest first, up to the node that made the memory.

    The list that ``chunk`` gives stands between a part and its whole like any other view.
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
    """``view`` and the views above it, up to ``whole``, which is left out."""
    return tuple(takewhile(lambda node: node is not whole, seen_through(view)))


def are_transposed(one: Any, other: Any, dim: int, with_dim: int) -> bool:
    """Whether two views of one memory differ by a swap of two dimensions, counted from the front."""
    first, second = tensor(one), tensor(other)
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
    """The node whose last dimension's two halves are ``first`` and ``second``; None where there is none."""
    wholes = set(seen_through(second))
    for whole in seen_through(first):
        if whole in wholes and _is_half(first, whole, 0) and _is_half(second, whole, 1):
            return whole
    return None


def _is_half(part: fx.Node, whole: fx.Node, index: int) -> bool:
    small, large = tensor(part), tensor(whole)
    if small is None or large is None or small.dtype is not large.dtype or small.dim() != large.dim():
        return False
    if small.dim() == 0 or not isinstance(size := small.shape[-1], int):
        return False
    return (
        same_size(2 * size, large.shape[-1])
        and same_sizes(small.shape[:-1], large.shape[:-1])
        and same_sizes(small.stride(), large.stride())
        and same_size(small.storage_offset(), large.storage_offset() + index * size * large.stride(-1))
    )
