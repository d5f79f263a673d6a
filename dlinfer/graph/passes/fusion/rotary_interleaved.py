"""Rotary embedding of adjacent pairs as model code writes it -> ``dlinfer.apply_rotary_pos_emb_interleaved``.

Two spellings. GPT-J, GLM and Cohere write x * cos + r * sin, where r holds the pairs (-x[2i + 1], x[2i]). Their tables
repeat each value, and the op reads a table of half the size. DeepSeek-V3 computes both halves of the result from tables
of half the size.

The op takes one tensor, so the rule replaces query and key separately.
"""

from collections.abc import Iterator, Sequence

from torch import fx
from torch.fx.node import Argument

from dlinfer import ops
from dlinfer.graph.ir.dialect import tensor_of
from dlinfer.graph.ir.layout import same_size
from dlinfer.graph.passes.fusion.layout import Swap, cast, contiguous_after, swapped
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
from dlinfer.graph.passes.fusion.rule import FusionRule, Match
from dlinfer.graph.passes.fusion.views import evens_and_odds
from dlinfer.graph.passes.rewriter import Rewriter

_Nodes = tuple[fx.Node, ...]

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
    tables = [(bound[name], False, ()) if is_halves else _half_table(bound[name]) for name in ("cos", "sin")]
    read = [table for table in tables if table is not None]
    if len(read) < 2 or not all(_broadcasts(rows, x, swap, doubled=doubled) for rows, doubled, _ in read):
        return None
    casts = (*widened_from(whole)[1], *widened_from(x)[1])
    wide = next((cast for cast in casts if dtype_of(cast) is dtype_of(output)), x)
    rows = tuple(table[0] for table in read)
    passed = (*bound.shared, *(node for table in read for node in table[2]))
    shared = tuple(node for node in dict.fromkeys(passed) if node is not wide and node not in rows)
    doubled = tuple(table[1] for table in read)
    values = {"dtype": dtype_of(output), "swap": swap, "halves": is_halves, "doubled": doubled}
    return Match((output,), bound.interior, (wide, *rows), values, shared)


# --- the tables


def _by_element(value: Argument, bound: Bindings) -> Iterator[Bindings]:
    """A doubled table, seen through elementwise ops that keep the last dimension."""
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


def _half_table(table: fx.Node) -> tuple[fx.Node, bool, _Nodes] | None:
    """(node, doubled, nodes between) for a table that repeats each value, side by side; else None.

    doubled: whether ``node`` still repeats the values.
    """
    below, casts = widened_from(table)
    for bound in matches(_DOUBLED, below):
        return bound["table"], False, (*casts, below)
    return (below, True, casts) if any(matches(_BY_ELEMENT, below)) else None


def _broadcasts(table: fx.Node, x: fx.Node, swap: Swap, *, doubled: bool) -> bool:
    """Whether the op can read a table for x, with both transposed."""
    shape, sizes = tensor_of(table).shape, tensor_of(x).shape
    if len(shape) != len(sizes) and (swap is not None or len(shape) > len(sizes)):
        return False
    if not same_size(shape[-1], sizes[-1] if doubled else sizes[-1] // 2):
        return False
    leading = zip(reversed(shape[:-1]), reversed(sizes[:-1]), strict=False)
    return tensor_of(table).is_floating_point() and all(
        same_size(a, 1) or same_size(a, b) for a, b in leading
    )


def _build(rewriter: Rewriter, match: Match, place: fx.Node) -> Sequence[fx.Node]:
    values = match.values
    x = swapped(rewriter, place, cast(rewriter, place, match.inputs[0], values["dtype"]), values["swap"])
    tables = []
    for table, doubled in zip(match.inputs[1:], values["doubled"], strict=True):
        last = rank_of(table) - 1
        half = rewriter.call(place, aten.slice.Tensor, table, last, 0, LAST, 2) if doubled else table
        tables.append(swapped(rewriter, place, cast(rewriter, place, half, values["dtype"]), values["swap"]))
    op = ops.apply_rotary_pos_emb_interleaved.overload
    return [swapped(rewriter, place, rewriter.call(place, op, x, *tables, values["halves"]), values["swap"])]


ROTARY_INTERLEAVED = FusionRule(
    name="rotary_interleaved",
    why="negating, stacking and flattening pairs writes the query three times before it is rotated",
    anchors=(aten.add.Tensor, aten.cat.default),
    match=_match,
    build=_build,
)
