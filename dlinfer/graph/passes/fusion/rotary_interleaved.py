"""Rotary embedding of adjacent pairs as model code writes it -> ``dlinfer.apply_rotary_pos_emb_interleaved``.

Two spellings. GPT-J, GLM and Cohere write x * cos + r * sin, where r holds the pairs (-x[2i + 1], x[2i]) and the tables
hold each value twice in a row; the op reads it once. DeepSeek-V3 writes both halves of the result from tables of half
the size, and keeps the halves.

The op takes one tensor, so query and key are fused each for itself, and either may be absent.
"""

from collections.abc import Sequence

from torch import fx

from dlinfer import ops
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.passes.fusion.layout import Swap, cast, contiguous_after, swapped
from dlinfer.graph.passes.fusion.match import (
    LAST,
    MUL,
    aten,
    calls,
    dtype_of,
    is_last_dim,
    is_tensor,
    operands,
    rank_of,
    same_shape,
    same_size,
    scalar_operand,
    skip_whole_slices,
    slice_of,
    widened_from,
)
from dlinfer.graph.passes.fusion.rule import FusionRule, Match
from dlinfer.graph.passes.rewriter import Rewriter

_Nodes = tuple[fx.Node, ...]


def _match(anchor: fx.Node) -> Match | None:
    return _match_halves(anchor) if calls(anchor, aten.cat.default) else _match_sum(anchor)


# --- x * cos + r * sin


def _match_sum(node: fx.Node) -> Match | None:
    for straight, crossed in operands(node, aten.add.Tensor):
        for rotated, sin in operands(crossed, aten.mul.Tensor):
            pairs = _rotated_pairs(rotated)
            if pairs is None:
                continue
            source, casts = widened_from(pairs[0])
            for x, cos in operands(straight, aten.mul.Tensor):
                if is_tensor(x) and is_tensor(cos) and is_tensor(sin) and widened_from(x)[0] is source:
                    interior = (straight, crossed, *pairs[1])
                    return _match_of(
                        node, x, (cos, sin), interior, (*casts, *widened_from(x)[1]), halves=False
                    )
    return None


def _rotated_pairs(node: fx.Node) -> tuple[fx.Node, _Nodes] | None:
    """(x, nodes), when ``node`` holds the pairs (-x[2i + 1], x[2i])."""
    if not is_tensor(node):
        return None
    node, casts = widened_from(node)
    if not calls(node, aten.flatten.using_ints, aten.view.default, aten.reshape.default):
        return None
    stack = node.args[0]
    if not calls(stack, aten.stack.default) or not is_last_dim((*stack.args, 0)[1], rank_of(stack)):
        return None
    if rank_of(node) != rank_of(stack) - 1 or not same_size(fake(node).shape[-1], 2 * fake(stack).shape[-2]):
        return None
    parts = stack.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or not calls(parts[0], aten.neg.default):
        return None
    found = _even_and_odd(parts[1], parts[0].args[0])
    if found is None or not same_shape(found[0], node):
        return None
    return found[0], (*casts, node, stack, parts[0], *found[1])


def _even_and_odd(even: object, odd: object) -> tuple[fx.Node, _Nodes] | None:
    """(x, nodes), when the two are x[..., 0::2] and x[..., 1::2]."""
    sources, nodes = [], []
    for start, node in enumerate((even, odd)):
        cut = slice_of(node)
        if cut is None or cut[1] != rank_of(cut[0]) - 1 or cut[2:] != (start, LAST, 2):
            return None
        source, whole = skip_whole_slices(cut[0])
        sources.append(source)
        nodes += [node, *whole]
    size = fake(sources[0]).shape[-1]
    if sources[0] is not sources[1] or not isinstance(size, int) or size % 2:
        return None
    return sources[0], tuple(nodes)


# --- the two halves of the result


def _match_halves(node: fx.Node) -> Match | None:
    """(a * cos - b * sin, b * cos + a * sin), a and b the even and odd features of x."""
    parts, dim = (*node.args, 0)[:2]
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or not is_last_dim(dim, rank_of(node)):
        return None
    minus, plus = parts
    if not calls(minus, aten.sub.Tensor) or minus.kwargs.get("alpha", 1) != 1:
        return None
    for a, cos in operands(minus.args[0], aten.mul.Tensor):
        for b, sin in operands(minus.args[1], aten.mul.Tensor):
            found = _even_and_odd(a, b)
            if found is None or not is_tensor(cos) or not is_tensor(sin):
                continue
            products = _products(plus, (b, cos), (a, sin))
            if products is not None:
                interior = (minus, plus, minus.args[0], minus.args[1], *products, *found[1])
                return _match_of(node, found[0], (cos, sin), interior, (), halves=True)  # pyright: ignore[reportArgumentType]
    return None


def _products(plus: object, one: tuple[object, object], other: tuple[object, object]) -> _Nodes | None:
    """The two products that ``plus`` adds, when they are of these factors."""
    for first, second in operands(plus, aten.add.Tensor):
        if one in list(operands(first, aten.mul.Tensor)) and other in list(operands(second, aten.mul.Tensor)):
            return first, second
    return None


# --- both


def _match_of(
    output: fx.Node,
    x: fx.Node,
    tables: tuple[fx.Node, fx.Node],
    interior: _Nodes,
    casts: _Nodes,
    *,
    halves: bool,
) -> Match | None:
    found, swap = contiguous_after(fake(output))
    if not found or rank_of(x) not in (3, 4) or not same_shape(output, x):
        return None
    read = (
        [_half_table(table) for table in tables] if not halves else [(table, False, ()) for table in tables]
    )
    if read[0] is None or read[1] is None:
        return None
    if not all(_broadcasts(entry[0], x, swap, doubled=entry[1]) for entry in read if entry is not None):
        return None
    wide = next((one for one in casts if dtype_of(one) is dtype_of(output)), x)
    rows = tuple(entry[0] for entry in read if entry is not None)
    passed = [node for entry in read if entry is not None for node in entry[2]]
    shared = tuple(node for node in dict.fromkeys([*casts, *passed]) if node is not wide and node not in rows)
    values = {
        "dtype": dtype_of(output),
        "swap": swap,
        "halves": halves,
        "doubled": tuple(entry[1] for entry in read if entry is not None),
    }
    return Match((output,), interior, (wide, *rows), values, shared)


def _half_table(table: fx.Node) -> tuple[fx.Node, bool, _Nodes] | None:
    """(node, doubled, nodes passed) for a table of full size that holds each value twice in a row.

    ``doubled`` is False when ``node`` is the table before it was doubled.
    """
    below, casts = widened_from(table)
    if _doubles(below):
        return below.args[0], False, (*casts, below)  # pyright: ignore[reportReturnType]
    node = below
    while node is not None:
        if _doubles(node):
            return below, True, casts
        node = _elementwise_source(node)
    return None


def _doubles(node: fx.Node) -> bool:
    if not calls(node, aten.repeat_interleave.self_int) or len(node.args) != 3 or node.args[1] != 2:
        return False
    return is_last_dim(node.args[2], rank_of(node))


def _elementwise_source(node: fx.Node) -> fx.Node | None:
    """What a node computes element by element from one tensor, the last dimension staying what it is."""
    scaled = scalar_operand(node, *MUL)
    if scaled is not None:
        return scaled[0]
    casts = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default)
    if calls(node, aten.cos.default, aten.sin.default, aten.neg.default, *casts):
        return node.args[0] if is_tensor(node.args[0]) else None
    if calls(node, aten.unsqueeze.default) and is_tensor(node.args[0]) and isinstance(node.args[1], int):
        return node.args[0] if node.args[1] not in (-1, rank_of(node.args[0])) else None
    return None


def _broadcasts(table: fx.Node, x: fx.Node, swap: Swap, *, doubled: bool) -> bool:
    """Whether the op can read a table for x, with two dimensions exchanged in both."""
    shape, sizes = fake(table).shape, fake(x).shape
    if len(shape) != len(sizes) and (swap is not None or len(shape) > len(sizes)):
        return False
    if not same_size(shape[-1], sizes[-1] if doubled else sizes[-1] // 2):
        return False
    leading = zip(reversed(shape[:-1]), reversed(sizes[:-1]), strict=False)
    return fake(table).is_floating_point() and all(same_size(a, 1) or same_size(a, b) for a, b in leading)


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
