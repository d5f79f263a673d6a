"""Patterns: what a fusion rule looks for, written as the calls that a model makes.

    SQUARE = any_of(call(aten.pow.Tensor_Scalar, "x", 2), call(aten.mul.Tensor, "x", "x"))

A pattern takes an argument of a node and earlier bindings, and yields the bindings of each match. The matcher
backtracks, and tries both orders of the operands of an addition and a multiplication; write the rarer first. In
a pattern a string binds a tensor to a name, and the same name stands for the same node. A list matches items, ``...``
matches anything, and other values must be equal. Dimensions count from the end. A parameter that a call does not
mention must have its default value.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType

from torch import fx
from torch.fx.node import Argument

from dlinfer.graph.ir.dialect import arguments, is_list, op_name, overload
from dlinfer.graph.passes.fusion.match import (
    ADD,
    MUL,
    calls,
    cast_source,
    is_number,
    is_tensor,
    rank_of,
    widened_from,
)
from dlinfer.graph.passes.fusion.views import are_transposed, seen_through, views_between
from dlinfer.graph.torch_private.dispatcher import Op, parameters_of

_COMMUTATIVE = frozenset((*ADD, *MUL))


@dataclass(frozen=True)
class Bindings:
    """A partial match. interior and shared: as in ``Match``."""

    nodes: Mapping[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    interior: tuple[fx.Node, ...] = ()
    shared: tuple[fx.Node, ...] = ()

    def __getitem__(self, name: str) -> fx.Node:
        return self.nodes[name]

    def inside(self, node: fx.Node) -> "Bindings":
        """With one more interior node."""
        return replace(self, interior=(*self.interior, node))

    def through(self, nodes: Sequence[fx.Node]) -> "Bindings":
        """With more shared nodes."""
        return replace(self, shared=(*self.shared, *nodes)) if nodes else self


Pattern = Callable[[Argument, Bindings], Iterator[Bindings]]
Part = Pattern | str | float | None | EllipsisType | list["Part"]
"""A pattern, or what stands for one: a name, a constant, anything, a list of parts."""


def matches(part: Part, anchor: fx.Node) -> Iterator[Bindings]:
    """All matches of a pattern that ends in ``anchor``. The anchor itself is not interior."""
    for bound in _pattern(part)(anchor, Bindings()):
        yield replace(bound, interior=tuple(node for node in bound.interior if node is not anchor))


Ops = Op | Sequence[Op | str]
"""One overload or several; a string names one by ``op_name``."""


def call(ops: Ops, *positional: Part, **named: Part) -> Pattern:
    """A call of one of some ops. Each argument that is not mentioned must have its default value."""
    return _call(ops, positional, named, exact=True)


def loose_call(ops: Ops, *positional: Part, **named: Part) -> Pattern:
    """As ``call``, but arguments that are not mentioned may have any value."""
    return _call(ops, positional, named, exact=False)


def _call(ops: Ops, positional: Sequence[Part], named: Mapping[str, Part], *, exact: bool) -> Pattern:
    targets = tuple(ops) if isinstance(ops, Sequence) else (ops,)
    by_string = isinstance(targets[0], str)
    by_position = [_pattern(part) for part in positional]
    by_name = {name: _pattern(part) for name, part in named.items()}

    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        if not isinstance(value, fx.Node) or not (
            value.target in targets or (by_string and op_name(value) in targets)
        ):
            return
        operands = arguments(value)
        parts = dict(zip(operands, by_position, strict=False)) | by_name
        if exact and not _rest_is_default(value, operands, parts):
            return
        if operands.get("dim") is not None:
            rank = max(rank_of(tensor) for tensor in (operands.get("self"), value) if is_tensor(tensor))
            operands["dim"] = _from_the_end(operands["dim"], rank)
        pairs = [(part, operands[name]) for name, part in parts.items()]
        yield from _all(pairs, bound.inside(value))
        if value.target in _COMMUTATIVE and operands["self"] is not operands["other"]:
            (first, left), (second, right), *rest = pairs
            yield from _all([(first, right), (second, left), *rest], bound.inside(value))

    return match


def item(sequence: Part, index: int) -> Pattern:
    """One result of a node that has several."""
    source = _pattern(sequence)

    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        if calls(value, operator.getitem) and value.args[1] == index:
            yield from source(value.args[0], bound.inside(value))

    return match


def any_of(*parts: Part) -> Pattern:
    """One of several patterns, tried in this order."""
    patterns = [_pattern(part) for part in parts]

    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        for each in patterns:
            yield from each(value, bound)

    return match


def both(*parts: Part) -> Pattern:
    """Several patterns of one argument."""
    patterns = [_pattern(part) for part in parts]
    return lambda value, bound: _all([(each, value) for each in patterns], bound)


def number(name: str) -> Pattern:
    """A Python number, bound to a name."""

    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        if is_number(value):
            yield replace(bound, numbers={**bound.numbers, name: value})

    return match


def widened(part: Part) -> Pattern:
    """A tensor, seen through casts that lose nothing. Others may use the casts too."""
    source = _pattern(part)

    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        if is_tensor(value):
            below, casts = widened_from(value)
            yield from source(below, bound.through(casts))

    return match


def through_casts(part: Part) -> Pattern:
    """A tensor, seen through any casts. They belong to the match."""
    source = _pattern(part)

    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        yield from source(value, bound)
        below = cast_source(value)
        if below is not None and is_tensor(value):
            yield from match(below, bound.inside(value))

    return match


def view_of(part: Part, is_source: Callable[[fx.Node, fx.Node], bool]) -> Pattern:
    """A view of a tensor, however the model spells it. ``is_source(tensor, view)`` accepts the tensor."""
    source = _pattern(part)

    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        if is_tensor(value):
            for node in seen_through(value):
                if is_source(node, value):
                    yield from source(node, bound.through(views_between(value, node)))

    return match


def transposed(part: Part, dim: int, with_dim: int) -> Pattern:
    """A view that exchanges two dimensions, counted from the front."""
    return view_of(part, lambda node, view: are_transposed(node, view, dim, with_dim))


def cut_from(whole: Part, cut: Callable[[fx.Node, fx.Node], fx.Node | None], parts: Part) -> Pattern:
    """A pattern of two parts, "first" and "second", and the tensor that ``cut`` finds both to be views of."""
    source, inner = _pattern(whole), _pattern(parts)

    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        for partial in inner(value, bound):
            first, second = partial["first"], partial["second"]
            node = cut(first, second)
            if node is not None:
                views = (*views_between(first, node), *views_between(second, node))
                yield from source(node, partial.through(views))

    return match


def shared(part: Part) -> Pattern:
    """A pattern whose nodes others may use too."""
    inner = _pattern(part)

    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        for partial in inner(value, replace(bound, interior=())):
            yield replace(partial, interior=bound.interior, shared=(*partial.shared, *partial.interior))

    return match


def _pattern(part: Part) -> Pattern:
    if isinstance(part, str):
        return _named(part)
    if isinstance(part, EllipsisType):
        return lambda _, bound: iter((bound,))
    if callable(part):
        return part
    return _items([_pattern(item) for item in part]) if isinstance(part, list) else _constant(part)


def _all(pairs: Sequence[tuple[Pattern, Argument]], bound: Bindings) -> Iterator[Bindings]:
    if not pairs:
        yield bound
        return
    (first, value), *rest = pairs
    for partial in first(value, bound):
        yield from _all(rest, partial)


def _named(name: str) -> Pattern:
    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        known = bound.nodes.get(name)
        if known is value and known is not None:
            yield bound
        elif known is None and is_tensor(value):
            yield replace(bound, nodes={**bound.nodes, name: value})

    return match


def _constant(expected: float | None) -> Pattern:
    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        if value is expected or (isinstance(value, (int, float)) and value == expected):
            yield bound

    return match


def _items(patterns: Sequence[Pattern]) -> Pattern:
    def match(value: Argument, bound: Bindings) -> Iterator[Bindings]:
        if is_list(value) and len(value) == len(patterns):
            yield from _all(list(zip(patterns, value, strict=True)), bound)

    return match


def _rest_is_default(node: fx.Node, operands: Mapping[str, Argument], parts: Mapping[str, Pattern]) -> bool:
    op = overload(node)
    assert op is not None, node.format_node()
    return all(
        parameter.name in parts
        or (parameter.has_default_value() and operands[parameter.name] == parameter.default_value)
        for parameter in parameters_of(op)
    )


def _from_the_end(dim: Argument, rank: int) -> Argument:
    """A dimension or a list of them, counted from the end."""
    if is_list(dim):
        return [_from_the_end(each, rank) for each in dim]
    return dim - rank if isinstance(dim, int) and dim >= 0 else dim
