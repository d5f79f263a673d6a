"""Fuse the rotary embedding of a query and a key, as model code writes it, into ``dlinfer.apply_rotary_pos_emb``.

A rotation is x * cos + rotate_half(x) * sin. Two rotations by the same tables are a layer's query and key. In partial
rotary embedding, x is a slice of each head, and the model concatenates the rest of the head after the rotation. The
rule leaves this slice and this concatenation in the graph.

All heads share the tables, which have size 1 in the dimension of the heads. If the model has heads before tokens, the
op reads transposed views.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import tensor_of
from dlinfer.graph.ir.layout import is_static, same_size, same_sizes
from dlinfer.graph.passes.fusion.layout import Swap, cast, fits, in_dtype, swapped
from dlinfer.graph.passes.fusion.match import (
    aten,
    calls,
    cast_source,
    dtype_of,
    is_tensor,
    rank_of,
    same_shape,
    widened_from,
)
from dlinfer.graph.passes.fusion.pattern import both, call, cut_from, matches, widened
from dlinfer.graph.passes.fusion.rule import Match, fusion_rule
from dlinfer.graph.passes.fusion.views import halves
from dlinfer.graph.passes.rewriter import Rewriter


class _Table(NamedTuple):
    """A cosine or sine table that is broadcast to x.

    rows: the node of the table: [batch or 1, tokens, size] or [tokens, size].
    heads: the dimension of x that the table is broadcast over.
    passed: the nodes between ``rows`` and the product with x.
    """

    rows: fx.Node
    heads: int
    passed: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Rotation:
    """A match of x * cos + rotate_half(x) * sin, computed by ``node``.

    heads: the dimension of x that both tables are broadcast over.
    interior: nodes that only the match may use.
    shared: nodes that the match looks through. Nodes outside the match may use them.
    """

    node: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    heads: int
    interior: tuple[fx.Node, ...]
    shared: tuple[fx.Node, ...]

    @property
    def swap(self) -> Swap:
        """The transposition that puts heads after tokens."""
        rank = rank_of(self.x)
        return None if self.heads == rank - 2 else (rank - 3, rank - 2)

    @property
    def sizes(self) -> list[int]:
        """The sizes of x without the dimension of heads."""
        sizes = list(tensor_of(self.x).shape)
        return [*sizes[: self.heads], *sizes[self.heads + 1 :]]


_ROTATED_HALF = cut_from(
    both("whole", widened("source")),
    halves,
    call(aten.cat.default, [call(aten.neg.default, "second"), "first"], -1),
)
_ROTATION = call(
    aten.add.Tensor,
    call(aten.mul.Tensor, widened(_ROTATED_HALF), "sin"),
    call(aten.mul.Tensor, both("x", widened("source")), "cos"),
)


def _match(anchor: fx.Node) -> Match | None:
    key = _rotation(anchor)
    query = _rotation_before(key) if key is not None else None
    if key is None or query is None:
        return None
    inputs = (query.x, key.x, query.cos, query.sin)
    build = partial(_build, dtype=dtype_of(key.node), swap=key.swap)
    interior, shared = (*query.interior, *key.interior), (*query.shared, *key.shared)
    return Match((query.node, key.node), interior, inputs, build, shared)


def _rotation(node: fx.Node) -> _Rotation | None:
    for bound in matches(_ROTATION, node):
        x = bound["x"]
        cos, sin = _table(bound["cos"], x), _table(bound["sin"], x)
        if cos is None or sin is None or cos.heads != sin.heads:
            continue
        shared = (*bound.shared, *cos.passed, *sin.passed)
        wide = in_dtype(dtype_of(node), bound["whole"], x)
        rotation = _Rotation(node, wide, cos.rows, sin.rows, cos.heads, bound.interior, shared)
        if rank_of(x) in (3, 4) and same_shape(node, x) and fits(tensor_of(node), rotation.swap):
            return rotation
        return None
    return None


def _table(ready: fx.Node, x: fx.Node) -> _Table | None:
    """Return the table behind ``ready`` if it has one row for each token and is broadcast over heads; else None."""
    rank = rank_of(x)
    node, casts = widened_from(ready)
    if calls(node, aten.unsqueeze.default) and is_tensor(node.args[0]) and isinstance(node.args[1], int):
        rows, passed = node.args[0], (*casts, node)
        heads = node.args[1] % rank_of(node) + rank - rank_of(node)
    else:  # [tokens, size] broadcasts to [heads, tokens, size]
        rows, passed, heads = node, casts, rank - 3
        if rank_of(rows) != 2:
            return None
    if heads not in (rank - 3, rank - 2) or rank_of(rows) not in (2, 3) or rank_of(rows) >= rank:
        return None
    tokens = rank - 2 if heads == rank - 3 else rank - 3
    shape, sizes = tensor_of(rows).shape, tensor_of(x).shape
    if not same_size(shape[-1], sizes[-1]) or not same_size(shape[-2], sizes[tokens]):
        return None
    if len(shape) == 3 and not same_size(shape[0], sizes[0]) and not same_size(shape[0], 1):
        return None
    return _Table(rows, heads, passed) if tensor_of(rows).is_floating_point() else None


def _rotation_before(key: _Rotation) -> _Rotation | None:
    """Return the last rotation before ``key`` by the same tables; None if there is none."""
    nearest = max((node for node in _sums_with(key.cos) if node < key.node), default=None)
    query = _rotation(nearest) if nearest is not None else None
    if query is None or query.node in key.interior or widened_from(key.x)[0] is query.node:
        return None  # a rotation of a rotation
    if (query.cos, query.sin, query.heads) != (key.cos, key.sin, key.heads):
        return None
    if dtype_of(query.node) is not dtype_of(key.node) or not same_sizes(query.sizes, key.sizes):
        return None
    return query


def _sums_with(rows: fx.Node) -> Iterator[fx.Node]:
    """Yield each node ``a + x * rows``. ``rows``, a table of rotary embedding, may be cast or unsqueezed before."""
    ready = [rows]
    while ready:
        node = ready.pop()
        for user in node.users:
            if calls(user, aten.mul.Tensor):
                yield from (total for total in user.users if calls(total, aten.add.Tensor))
            elif calls(user, aten.unsqueeze.default) or cast_source(user) is node:
                ready.append(user)


def _build(
    rewriter: Rewriter, match: Match, place: fx.Node, *, dtype: torch.dtype, swap: Swap
) -> Sequence[fx.Node]:
    query, key, cos, sin = (cast(rewriter, place, node, dtype) for node in match.inputs)
    query, key = (swapped(rewriter, place, node, swap) for node in (query, key))
    cos, sin = (_one_row_per_token(rewriter, place, table, query) for table in (cos, sin))
    both = rewriter.call(place, ops.apply_rotary_pos_emb.overload, query, key, cos, sin)
    items = [rewriter.call(place, operator.getitem, both, index) for index in range(2)]
    return [swapped(rewriter, place, item, swap) for item in items]


def _one_row_per_token(rewriter: Rewriter, at: fx.Node, rows: fx.Node, query: fx.Node) -> fx.Node:
    shape = tensor_of(query).shape
    is_expanded = rank_of(rows) == 3 and same_size(tensor_of(rows).shape[0], shape[0])
    if len(shape) == 3 or same_size(shape[0], 1) or is_expanded:
        return rows
    for user in rows.users:  # an earlier layer may have made the same view
        sizes = (shape[0], *tensor_of(rows).shape[-2:])
        if calls(user, aten.expand.default) and user < at and same_sizes(tensor_of(user).shape, sizes):
            return user
    batch = shape[0] if is_static(shape[0]) else rewriter.call(at, aten.sym_size.int, query, 0)
    return rewriter.call(at, aten.expand.default, rows, [batch, -1, -1])


ROTARY = fusion_rule(
    name="rotary",
    why="a rotation is seven kernels and four tensors as large as the query; the op reads each element once",
    anchors=(aten.add.Tensor,),
    match=_match,
)
