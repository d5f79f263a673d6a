"""Patterns of fusion rules, written as the calls that a model makes.

    SQUARE = any_of(call(aten.pow.Tensor_Scalar, "x", 2), call(aten.mul.Tensor, "x", "x"))

A pattern is a function. It takes an argument of a node and earlier bindings, and yields the bindings of each match. The
matcher backtracks, and tries both orders of the operands of an addition or a multiplication. Write the rarer operand
first.

Inside a pattern,

- a string binds a tensor to a name. The same name stands for the same node.
- a list matches a list with matching items.
- ``...`` matches anything.
- any other value matches an equal value.

Dimensions count from the end. If a pattern does not mention a parameter of the called op, this parameter must have its
default value.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Concatenate, ParamSpec

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
    """A partial match: name -> node, and name -> number.

    interior: nodes that only the match may use.
    shared: nodes that the match looks through, such as casts and views. Nodes outside the match may use them.
    """

    nodes: Mapping[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    interior: tuple[fx.Node, ...] = ()
    shared: tuple[fx.Node, ...] = ()

    def __getitem__(self, name: str) -> fx.Node:
        return self.nodes[name]

    def inside(self, node: fx.Node) -> "Bindings":
        return replace(self, interior=(*self.interior, node))

    def through(self, nodes: Sequence[fx.Node]) -> "Bindings":
        return replace(self, shared=(*self.shared, *nodes)) if nodes else self


P = ParamSpec("P")
Pattern = Callable[[Argument, Bindings], Iterator[Bindings]]
Part = Pattern | str | float | None | EllipsisType | list["Part"]
"""A pattern, or a value that stands for one: a name, a constant, ``...`` for anything, a list of parts."""


def matches(part: Part, anchor: fx.Node) -> Iterator[Bindings]:
    """Yield all matches of a pattern that ends in ``anchor``. The anchor is not among the interior nodes."""
    for bound in _match(part, anchor, Bindings()):
        yield replace(bound, interior=tuple(node for node in bound.interior if node is not anchor))


def _match(part: Part, value: Argument, bound: Bindings) -> Iterator[Bindings]:
    if callable(part):
        return part(value, bound)
    if isinstance(part, list):
        items = value if is_list(value) else ()
        return _all(list(zip(part, items, strict=True)), bound) if len(items) == len(part) else iter(())
    if isinstance(part, str):
        node = bound.nodes.get(part)
        if node is None and is_tensor(value):
            return iter((replace(bound, nodes={**bound.nodes, part: value}),))
        return iter((bound,) if node is not None and node is value else ())
    is_equal = value is part or (isinstance(value, (int, float)) and value == part)
    return iter((bound,) if part is ... or is_equal else ())


def _all(pairs: Sequence[tuple[Part, Argument]], bound: Bindings) -> Iterator[Bindings]:
    if not pairs:
        yield bound
        return
    (first, value), *rest = pairs
    for partial in _match(first, value, bound):
        yield from _all(rest, partial)


def _kind(match: Callable[Concatenate[Argument, Bindings, P], Iterator[Bindings]]) -> Callable[P, Pattern]:
    """A decorator that turns a function ``match(value, bound, ...)`` into a function that makes patterns.

    The new function takes the arguments of ``match`` after ``value`` and ``bound``: ``item(sequence, 0)`` is a pattern.
    """

    def pattern(*args: P.args, **kwargs: P.kwargs) -> Pattern:
        return lambda value, bound: match(value, bound, *args, **kwargs)

    return pattern


Ops = Op | Sequence[Op] | Sequence[str]
"""One or several overloads. A string names an overload, as ``op_name`` returns it."""


def call(ops: Ops, *positional: Part, **named: Part) -> Pattern:
    """Return a pattern of a call of one of ``ops``. Parameters that the pattern omits must have their defaults."""
    return _call(ops if isinstance(ops, Sequence) else (ops,), positional, named, is_exact=True)


def loose_call(ops: Ops, *positional: Part, **named: Part) -> Pattern:
    """Return a pattern like ``call``, except that parameters that the pattern omits may have any value."""
    return _call(ops if isinstance(ops, Sequence) else (ops,), positional, named, is_exact=False)


@_kind
def _call(
    value: Argument,
    bound: Bindings,
    ops: Sequence[Op] | Sequence[str],
    positional: Sequence[Part],
    named: dict[str, Part],
    is_exact: bool,
) -> Iterator[Bindings]:
    if not isinstance(value, fx.Node):
        return
    if (op_name(value) if isinstance(ops[0], str) else value.target) not in ops:
        return
    operands = arguments(value)
    parts = dict(zip(operands, positional, strict=False)) | named
    if is_exact and not _rest_is_default(value, operands, parts):
        return
    if operands.get("dim") is not None:
        rank = max(rank_of(tensor) for tensor in (operands.get("self"), value) if is_tensor(tensor))
        operands["dim"] = _from_the_end(operands["dim"], rank)
    pairs = [(part, operands[name]) for name, part in parts.items()]
    yield from _all(pairs, bound.inside(value))
    if value.target in _COMMUTATIVE and operands["self"] is not operands["other"]:
        (first, left), (second, right), *rest = pairs
        yield from _all([(first, right), (second, left), *rest], bound.inside(value))


def _rest_is_default(node: fx.Node, operands: Mapping[str, Argument], parts: Mapping[str, Part]) -> bool:
    op = overload(node)
    assert op is not None, node.format_node()
    return all(
        parameter.name in parts
        or (parameter.has_default_value() and operands[parameter.name] == parameter.default_value)
        for parameter in parameters_of(op)
    )


def _from_the_end(dim: Argument, rank: int) -> Argument:
    if is_list(dim):
        return [_from_the_end(each, rank) for each in dim]
    return dim - rank if isinstance(dim, int) and dim >= 0 else dim


@_kind
def item(value: Argument, bound: Bindings, sequence: Part, index: int) -> Iterator[Bindings]:
    """Match the result ``index`` of a node that returns a sequence."""
    if calls(value, operator.getitem) and value.args[1] == index:
        yield from _match(sequence, value.args[0], bound.inside(value))


@_kind
def any_of(value: Argument, bound: Bindings, *parts: Part) -> Iterator[Bindings]:
    for part in parts:
        yield from _match(part, value, bound)


@_kind
def both(value: Argument, bound: Bindings, *parts: Part) -> Iterator[Bindings]:
    return _all([(part, value) for part in parts], bound)


@_kind
def number(value: Argument, bound: Bindings, name: str) -> Iterator[Bindings]:
    """Match a Python number, and bind it to a name."""
    if is_number(value):
        yield replace(bound, numbers={**bound.numbers, name: value})


@_kind
def widened(value: Argument, bound: Bindings, part: Part) -> Iterator[Bindings]:
    """Match a tensor behind exact casts, which go to the same or a wider float.

    Nodes outside the match may use the casts too.
    """
    if is_tensor(value):
        source, casts = widened_from(value)
        yield from _match(part, source, bound.through(casts))


@_kind
def through_casts(value: Argument, bound: Bindings, part: Part) -> Iterator[Bindings]:
    """Match a tensor behind any casts. The casts are interior nodes of the match."""
    while is_tensor(value):
        yield from _match(part, value, bound)
        value, bound = cast_source(value), bound.inside(value)


@_kind
def view_of(
    value: Argument, bound: Bindings, part: Part, is_source: Callable[[fx.Node, fx.Node], bool]
) -> Iterator[Bindings]:
    """Match a view of a tensor, made by any view ops.

    is_source: takes a tensor and the view, and returns whether this is the right view of the tensor.
    """
    if is_tensor(value):
        for node in seen_through(value):
            if is_source(node, value):
                yield from _match(part, node, bound.through(views_between(value, node)))


def transposed(part: Part, dim: int, with_dim: int) -> Pattern:
    """Return a pattern of a view that exchanges two dimensions, counted from the front."""
    return view_of(part, lambda node, view: are_transposed(node, view, dim, with_dim))


@_kind
def cut_from(
    value: Argument,
    bound: Bindings,
    whole: Part,
    cut: Callable[[fx.Node, fx.Node], fx.Node | None],
    parts: Part,
) -> Iterator[Bindings]:
    """Match two parts of one tensor, and then the tensor itself.

    parts: a pattern that binds the two parts as "first" and "second".
    cut: takes the two parts, and returns the tensor that both are cut from; None if there is none.
    whole: the pattern of this tensor.
    """
    for partial in _match(parts, value, bound):
        first, second = partial["first"], partial["second"]
        node = cut(first, second)
        if node is not None:
            views = (*views_between(first, node), *views_between(second, node))
            yield from _match(whole, node, partial.through(views))


@_kind
def shared(value: Argument, bound: Bindings, part: Part) -> Iterator[Bindings]:
    """Match a pattern whose nodes may also be used outside the match."""
    for partial in _match(part, value, replace(bound, interior=())):
        yield replace(partial, interior=bound.interior, shared=(*partial.shared, *partial.interior))
