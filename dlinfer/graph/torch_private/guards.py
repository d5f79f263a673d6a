"""Guards: what was assumed of symbols while a graph was traced or compiled."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dlinfer.graph.torch_private.dynamo import source_name
from dlinfer.graph.torch_private.expressions import Size, conjuncts, named, parse_condition
from dlinfer.graph.torch_private.symbols import plain_symbol


def guards_of(mode: FakeTensorMode) -> list[str]:
    """The guards that were put on the symbols of a mode, as sympy's text."""
    import sympy

    assert mode.shape_env is not None
    return [sympy.srepr(guard.expr) for guard in mode.shape_env.guards]


def guard_all(guards: Sequence[str], original: dict[Any, Any], environment: ShapeEnv | None) -> bool:
    """Put guards (of ``guards_of``) on the original symbols; False where one does not hold for their example."""
    import sympy
    from torch.utils._sympy import functions

    if not guards:
        return True
    assert environment is not None
    by_name = {str(fresh): symbol for fresh, symbol in original.items()}
    names: dict[str, Any] = {name: getattr(functions, name) for name in functions.__all__}
    mapped = []
    for text in guards:
        expression: Any = sympy.sympify(text, locals=names)  # pyright: ignore[reportCallIssue, reportArgumentType]
        mapped.append(expression.xreplace({s: by_name[str(s)] for s in expression.free_symbols}))
    # A look first: to evaluate one that is false would guard the graph by its contrary.
    if any(one.xreplace(environment.backed_var_to_val) != sympy.true for one in mapped):
        return False
    return all(environment.evaluate_expr(one) for one in mapped)


def shape_guards(mode: FakeTensorMode) -> list[str]:
    """What a compilation assumed about its sizes and folded scalars, and the model's line that asked for it."""
    environment = mode.shape_env
    assert environment is not None
    sources: dict[Any, Any] = environment.var_to_sources
    found = []
    for guard in environment.guards:
        text = str(guard.expr)
        for symbol in guard.expr.free_symbols:
            if not symbol.is_integer:  # a folded float says more by its name in the model
                text = text.replace(str(symbol), source_name(sources[symbol][0].name))
        line = guard.sloc.maybe_user_loc
        found.append(f"{text}  {line}" if line else text)
    return found


def conditions(mode: FakeTensorMode, inputs: Sequence[tuple[str, Any]]) -> list[tuple[Size, tuple[str, ...]]]:
    """What a compilation assumed about sizes and integers: conditions over v0, v1, ..., and where to read those.

    inputs: an expression and the fake of each input of the graph. Guards, and sizes that were equal when the graph
    was captured or are computed from others; sizes marked as unknown are equal only where that was said. Guards on
    floats are left out: a float is a constant of the graph. Raises SizeTextError for a guard without a written form.
    """
    environment = mode.shape_env
    assert environment is not None

    def numbered(expression: Any, symbols: Sequence[Any], start: int = 0) -> Size:
        return named(expression, {symbol: f"v{index}" for index, symbol in enumerate(symbols, start)})

    places: dict[Any, str] = {}
    for source, example in inputs:
        if (symbol := plain_symbol(example)) is not None:
            places.setdefault(symbol, source)
    sizes = [
        (f"{source}.size()[{dim}]", size.node.expr)
        for source, example in inputs
        for dim, size in enumerate(example.shape if isinstance(example, torch.Tensor) else ())
        if isinstance(size, torch.SymInt)
    ]
    found: list[tuple[Size, tuple[str, ...]]] = []
    for place, expression in sizes:
        is_first = not expression.is_symbol or places.setdefault(expression, place) == place
        if not is_first and expression in environment.backed_var_to_val:
            found.append((parse_condition("v0 == v1"), (places[expression], place)))
    for place, expression in sizes:
        symbols = sorted(expression.free_symbols, key=str)
        if not expression.is_symbol and symbols and all(symbol in places for symbol in symbols):
            computed = numbered(expression, symbols, 1)
            found.append((parse_condition(f"v0 == {computed}"), (place, *map(places.__getitem__, symbols))))
    origin: dict[Any, Any] = environment.var_to_sources
    for guard in environment.guards:
        symbols = sorted(guard.expr.free_symbols, key=str)
        if all(symbol.is_integer for symbol in symbols):
            read = tuple(places.get(symbol) or origin[symbol][0].name for symbol in symbols)
            found += [(numbered(part, symbols), read) for part in conjuncts(guard.expr)]
    return found


def conditions_of(mode: FakeTensorMode, names: Mapping[Any, str]) -> list[Size]:
    """What was assumed of the symbols of ``names`` so far, and what was left to be checked at each call.

    Raises SizeTextError where it also speaks of other symbols or has no such form.
    """
    env = mode.shape_env
    assert env is not None
    left = [assertion.expr for found in env.deferred_runtime_asserts.values() for assertion in found]
    assumed = [guard.expr for guard in env.guards if all(s.is_integer for s in guard.expr.free_symbols)]
    found: dict[str, Size] = {}
    for expression in (*assumed, *(one for one in left if one.free_symbols <= set(names))):
        # A symbol that turned out equal to another, or to a number, stands in no size that is asked for later: it has
        # no name. One that has a name is read somewhere, so that what was assumed of it stays a condition.
        is_named = expression.free_symbols <= set(names)
        for part in conjuncts(expression if is_named else env.simplify(expression)):
            condition = named(part, names)
            found[str(condition)] = condition
    return list(found.values())
