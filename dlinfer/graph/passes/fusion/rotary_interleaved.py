"""Fuse the rotary embedding of adjacent pairs into ``dlinfer.apply_rotary_pos_emb_interleaved``.

Models write it in two ways:

- GPT-J, GLM and Cohere write x * cos + r * sin, where r has the pairs (-x[2i + 1], x[2i]). Their tables repeat each
  value. The op needs each value once, so the rule takes every second one.
- DeepSeek-V3 computes the two halves of the result separately, from tables that have each value once.

The op takes one tensor, so the rule replaces query and key separately.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import fx
from torch.fx.node import Argument

from dlinfer import ops
from dlinfer.graph.ir.dialect import tensor_of
from dlinfer.graph.ir.layout import same_size
from dlinfer.graph.passes.fusion.layout import Swap, cast, contiguous_after, in_dtype, swapped
from dlinfer.graph.passes.fusion.match import (
    CASTS,
    LAST,
    MUL,
    aten,
    calls,
    dtype_of,
    rank_of,
    same_shape,
    widened_from,
)
from dlinfer.graph.passes.fusion.pattern import (
    Bindings,
    any_of,
    both,
    call,
    cut_from,
    loose_call,
    matches,
    number,
    widened,
)
from dlinfer.graph.passes.fusion.rule import Match, fusion_rule
from dlinfer.graph.passes.fusion.views import evens_and_odds
from dlinfer.graph.passes.rewriter import Rewriter


class _Table(NamedTuple):
    """A table of cosines or sines.

    doubled: whether the table repeats each value, side by side.
    passed: the nodes between the table and the product with the table.
    """

    node: fx.Node
    doubled: bool = False
    passed: tuple[fx.Node, ...] = ()


_ROTATED_PAIRS = cut_from(  # (-x[2i + 1], x[2i]) for each i
    both("whole", widened("source")),
    evens_and_odds,
    both(
        "pairs",
        loose_call(
            (aten.flatten.using_ints, aten.view.default, aten.reshape.default),
            call(aten.stack.default, [call(aten.neg.default, "second"), "first"], -1),
        ),
    ),
)
_SUM = call(
    aten.add.Tensor,
    call(aten.mul.Tensor, widened(_ROTATED_PAIRS), "sin"),
    call(aten.mul.Tensor, both("x", widened("source")), "cos"),
)
_HALVES = cut_from(  # (a * cos - b * sin, b * cos + a * sin), a and b the even and odd features of x
    both("x", "source"),
    evens_and_odds,
    call(
        aten.cat.default,
        [
            call(
                aten.sub.Tensor, call(aten.mul.Tensor, "first", "cos"), call(aten.mul.Tensor, "second", "sin")
            ),
            call(
                aten.add.Tensor, call(aten.mul.Tensor, "second", "cos"), call(aten.mul.Tensor, "first", "sin")
            ),
        ],
        -1,
    ),
)


def _match(output: fx.Node) -> Match | None:
    is_halves = calls(output, aten.cat.default)
    bound = next(matches(_HALVES if is_halves else _SUM, output), None)
    if bound is None:
        return None
    x = bound["x"]
    whole = bound.nodes.get("whole", x)
    is_contiguous, swap = contiguous_after(tensor_of(output))
    if not is_contiguous or rank_of(x) not in (3, 4) or not same_shape(output, x):
        return None
    if not is_halves and not same_shape(whole, bound["pairs"]):
        return None
    names = ("cos", "sin")
    tables = [_Table(bound[name]) if is_halves else _half_table(bound[name]) for name in names]
    read = [table for table in tables if table is not None and _broadcasts(table, x, swap)]
    if len(read) < 2:
        return None
    doubled = [table.doubled for table in read]
    inputs = (in_dtype(dtype_of(output), whole, x), *(table.node for table in read))
    shared = (*bound.shared, *(node for table in read for node in table.passed))
    build = partial(_build, swap=swap, halves=is_halves, doubled=doubled)
    return Match((output,), bound.interior, inputs, build, shared)


# --- the tables


def _by_element(value: Argument, bound: Bindings) -> Iterator[Bindings]:
    """Match a doubled table behind elementwise ops that keep the last dimension."""
    return _BY_ELEMENT(value, bound)


def _not_last(dim: Argument, bound: Bindings) -> Iterator[Bindings]:
    return iter((bound,) if isinstance(dim, int) and dim != -1 else ())


_DOUBLED = call(aten.repeat_interleave.self_int, "table", 2, -1)
_BY_ELEMENT = any_of(
    _DOUBLED,
    call(MUL, _by_element, number("scale")),
    loose_call((aten.cos.default, aten.sin.default, aten.neg.default, *CASTS), _by_element),
    call(aten.unsqueeze.default, _by_element, _not_last),
)


def _half_table(table: fx.Node) -> _Table | None:
    """Return a table that repeats each value, side by side. Return None if ``table`` does not.

    If the repetition is the last step that computes ``table``, return the table before this step. It has half the size.
    """
    below, casts = widened_from(table)
    for bound in matches(_DOUBLED, below):
        return _Table(bound["table"], False, (*casts, below))
    return _Table(below, True, casts) if any(matches(_BY_ELEMENT, below)) else None


def _broadcasts(table: _Table, x: fx.Node, swap: Swap) -> bool:
    rows = tensor_of(table.node)
    shape, sizes = rows.shape, tensor_of(x).shape
    if len(shape) != len(sizes) and (swap is not None or len(shape) > len(sizes)):
        return False
    if not same_size(shape[-1], sizes[-1] if table.doubled else sizes[-1] // 2):
        return False
    leading = zip(reversed(shape[:-1]), reversed(sizes[:-1]), strict=False)
    return rows.is_floating_point() and all(same_size(a, 1) or same_size(a, b) for a, b in leading)


def _build(
    rewriter: Rewriter, match: Match, place: fx.Node, *, swap: Swap, halves: bool, doubled: Sequence[bool]
) -> Sequence[fx.Node]:
    def operand(node: fx.Node, is_doubled: bool = False) -> fx.Node:
        last = rank_of(node) - 1
        half = rewriter.call(place, aten.slice.Tensor, node, last, 0, LAST, 2) if is_doubled else node
        return swapped(rewriter, place, cast(rewriter, place, half, dtype_of(match.outputs[0])), swap)

    operands = list(map(operand, match.inputs, (False, *doubled)))
    rotated = rewriter.call(place, ops.apply_rotary_pos_emb_interleaved.overload, *operands, halves)
    return [swapped(rewriter, place, rotated, swap)]


ROTARY_INTERLEAVED = fusion_rule(
    name="rotary_interleaved",
    why="negating, stacking and flattening pairs writes the query three times before it is rotated",
    anchors=(aten.add.Tensor, aten.cat.default),
    match=_match,
)
