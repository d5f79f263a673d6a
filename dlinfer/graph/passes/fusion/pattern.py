"""Patterns: what a fusion rule looks for, written as the calls that a model makes.

    SQUARE = any_of(call(aten.pow.Tensor_Scalar, "x", 2), call(aten.mul.Tensor, "x", "x"))

A pattern takes an argument of a node and what was bound before, and yields the bindings under which it matches. The
matcher backtracks, and tries both orders of the operands of an addition and a multiplication; write the rarer first. In
a pattern a string binds a tensor to a name, and the same name stands for the same node. A list matches items, ``...``
matches anything, and other values must be equal. Dimensions count from the end. A parameter that a call does not
mention must have its default value.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import TypeGuard

from torch import fx
from torch.fx.node import Argument

from dlinfer.graph.ir.dialect import arguments, op_name, overload
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
from dlinfer.graph.torch_private.dispatcher import OpOverload

_COMMUTATIVE = frozenset((*ADD, *MUL))


@dataclass(frozen=True)
class Found:
    """A partial match. interior and shared: as in ``Match``."""

    nodes: Mapping[str, fx.Node] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    interior: tuple[fx.Node, ...] = ()
    shared: tuple[fx.Node, ...] = ()

    def __getitem__(self, name: str) -> fx.Node:
        return self.nodes[name]

    def inside(self, node: fx.Node) -> "Found":
        """With one more interior node."""
        return replace(self, interior=(*self.interior, node))

    def through(self, nodes: Sequence[fx.Node]) -> "Found":
        """With more shared nodes."""
        return replace(self, shared=(*self.shared, *nodes)) if nodes else self


Pattern = Callable[[Argument, Found], Iterator[Found]]
Part = Pattern | str | float | None | EllipsisType | list["Part"]
"""A pattern, or what stands for one: a name, a constant, anything, a list of parts."""


def matches(part: Part, anchor: fx.Node) -> Iterator[Found]:
    """The ways in which a pattern that ends in ``anchor`` matches; the anchor itself is not interior."""
    for found in _pattern(part)(anchor, Found()):
        yield replace(found, interior=tuple(node for node in found.interior if node is not anchor))


Ops = OpOverload | Sequence[OpOverload | str]
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

    def match(value: Argument, found: Found) -> Iterator[Found]:
        if not isinstance(value, fx.Node) or not (
            value.target in targets or (by_string and op_name(value) in targets)
        ):
            return
        given = arguments(value)
        parts = dict(zip(given, by_position, strict=False)) | by_name
        if exact and not _rest_is_default(value, given, parts):
            return
        dims = _negative_dims(value, given)
        pairs = [(part, dims.get(name, given[name])) for name, part in parts.items()]
        yield from _all(pairs, found.inside(value))
        if value.target in _COMMUTATIVE and given["self"] is not given["other"]:
            (first, left), (second, right), *rest = pairs
            yield from _all([(first, right), (second, left), *rest], found.inside(value))

    return match


def item(sequence: Part, index: int) -> Pattern:
    """One result of a node that has several."""
    source = _pattern(sequence)

    def match(value: Argument, found: Found) -> Iterator[Found]:
        if calls(value, operator.getitem) and value.args[1] == index:
            yield from source(value.args[0], found.inside(value))

    return match


def any_of(*parts: Part) -> Pattern:
    """One of several patterns, tried in this order."""
    patterns = [_pattern(part) for part in parts]

    def match(value: Argument, found: Found) -> Iterator[Found]:
        for each in patterns:
            yield from each(value, found)

    return match


def both(*parts: Part) -> Pattern:
    """Several patterns of one argument."""
    patterns = [_pattern(part) for part in parts]
    return lambda value, found: _all([(each, value) for each in patterns], found)


def number(name: str) -> Pattern:
    """A Python number, bound to a name."""

    def match(value: Argument, found: Found) -> Iterator[Found]:
        if is_number(value):
            yield replace(found, numbers={**found.numbers, name: value})

    return match


def widened(part: Part) -> Pattern:
    """A tensor, seen through casts that lose nothing. Others may use the casts too."""
    source = _pattern(part)

    def match(value: Argument, found: Found) -> Iterator[Found]:
        if is_tensor(value):
            below, casts = widened_from(value)
            yield from source(below, found.through(casts))

    return match


def through_casts(part: Part) -> Pattern:
    """A tensor, seen through any casts. They belong to the match."""
    source = _pattern(part)

    def match(value: Argument, found: Found) -> Iterator[Found]:
        yield from source(value, found)
        below = cast_source(value)
        if below is not None and is_tensor(value):
            yield from match(below, found.inside(value))

    return match


def view_of(part: Part, is_source: Callable[[fx.Node, fx.Node], bool]) -> Pattern:
    """A view, seen through to a tensor for which ``is_source(tensor, view)``, however the model spells it."""
    source = _pattern(part)

    def match(value: Argument, found: Found) -> Iterator[Found]:
        if is_tensor(value):
            for node in seen_through(value):
                if is_source(node, value):
                    yield from source(node, found.through(views_between(value, node)))

    return match


def transposed(part: Part, dim: int, with_dim: int) -> Pattern:
    """A view that exchanges two dimensions, counted from the front."""
    return view_of(part, lambda node, view: are_transposed(node, view, dim, with_dim))


def cut_from(whole: Part, cut: Callable[[fx.Node, fx.Node], fx.Node | None], parts: Part) -> Pattern:
    """A pattern of two parts, "first" and "second", and the tensor that ``cut`` finds both to be views of."""
    source, inner = _pattern(whole), _pattern(parts)

    def match(value: Argument, found: Found) -> Iterator[Found]:
        for partial in inner(value, found):
            first, second = partial["first"], partial["second"]
            node = cut(first, second)
            if node is not None:
                views = (*views_between(first, node), *views_between(second, node))
                yield from source(node, partial.through(views))

    return match


def shared(part: Part) -> Pattern:
    """A pattern whose nodes others may use too."""
    inner = _pattern(part)

    def match(value: Argument, found: Found) -> Iterator[Found]:
        for partial in inner(value, replace(found, interior=())):
            yield replace(partial, interior=found.interior, shared=(*partial.shared, *partial.interior))

    return match


def _pattern(part: Part) -> Pattern:
    if isinstance(part, str):
        return _named(part)
    if isinstance(part, EllipsisType):
        return lambda _, found: iter((found,))
    if isinstance(part, list):
        return _items([_pattern(item) for item in part])
    return _constant(part) if part is None or isinstance(part, (int, float)) else part


def _all(pairs: Sequence[tuple[Pattern, Argument]], found: Found) -> Iterator[Found]:
    if not pairs:
        yield found
        return
    (first, value), *rest = pairs
    for partial in first(value, found):
        yield from _all(rest, partial)


def _named(name: str) -> Pattern:
    def match(value: Argument, found: Found) -> Iterator[Found]:
        known = found.nodes.get(name)
        if known is value and known is not None:
            yield found
        elif known is None and is_tensor(value):
            yield replace(found, nodes={**found.nodes, name: value})

    return match


def _constant(expected: float | None) -> Pattern:
    def match(value: Argument, found: Found) -> Iterator[Found]:
        if value is expected or (isinstance(value, (int, float)) and value == expected):
            yield found

    return match


def _items(patterns: Sequence[Pattern]) -> Pattern:
    def match(value: Argument, found: Found) -> Iterator[Found]:
        if _is_list(value) and len(value) == len(patterns):
            yield from _all(list(zip(patterns, value, strict=True)), found)

    return match


def _is_list(value: Argument) -> TypeGuard[Sequence[Argument]]:
    return isinstance(value, (list, tuple))


def _rest_is_default(node: fx.Node, given: Mapping[str, Argument], parts: Mapping[str, Pattern]) -> bool:
    op = overload(node)
    assert op is not None, node.format_node()
    return all(
        parameter.name in parts
        or (parameter.has_default_value() and given[parameter.name] == parameter.default_value)
        for parameter in op._schema.arguments
    )


def _negative_dims(node: fx.Node, given: Mapping[str, Argument]) -> dict[str, Argument]:
    """The argument ``dim``, an int or a list of ints, counted from the end."""
    dim = given.get("dim")
    if dim is None:
        return {}
    rank = max(rank_of(value) for value in (given.get("self"), node) if is_tensor(value))
    dims = [
        one - rank if isinstance(one, int) and one >= 0 else one for one in (dim if _is_list(dim) else [dim])
    ]
    return {"dim": dims if _is_list(dim) else dims[0]}
