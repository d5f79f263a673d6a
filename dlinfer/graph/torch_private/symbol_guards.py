"""Guards: what was assumed of symbols while a graph was traced or compiled."""

# sympy and torch's symbolic numbers have no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions

from dlinfer.graph.torch_private.dynamo import source_name
from dlinfer.graph.torch_private.expressions import Expression, Size, conjuncts, named, parse_condition
from dlinfer.graph.torch_private.fake_mode import environment_of
from dlinfer.graph.torch_private.symbols import plain_symbol


def guards_of(mode: FakeTensorMode) -> list[str]:
    """The guards that were put on the symbols of a mode, as sympy's text."""
    return [sympy.srepr(guard.expr) for guard in environment_of(mode).guards]


def guard_all(
    guards: Sequence[str], original: Mapping[Expression, Expression], environment: ShapeEnv | None
) -> bool:
    """Put guards (of ``guards_of``) on the original symbols; False where one does not hold for their example."""
    if not guards:
        return True
    assert environment is not None
    by_name = {str(fresh): symbol for fresh, symbol in original.items()}
    scope: dict[str, Any] = {name: getattr(functions, name) for name in functions.__all__}
    conditions: list[Expression] = []
    sympify: Any = sympy.sympify
    for text in guards:
        guard: Expression = sympify(text, locals=scope)
        conditions.append(guard.xreplace({symbol: by_name[str(symbol)] for symbol in guard.free_symbols}))
    # A look first: to evaluate a false one would guard the graph by its contrary.
    if any(guard.xreplace(environment.backed_var_to_val) != sympy.true for guard in conditions):
        return False
    return all(map(environment.evaluate_expr, conditions))


def shape_guards(mode: FakeTensorMode) -> list[str]:
    """Assumptions about sizes and folded scalars, each with the line of the model that asked for it."""
    environment = environment_of(mode)
    lines: list[str] = []
    for guard in environment.guards:
        text = str(guard.expr)
        for symbol in guard.expr.free_symbols:
            if not symbol.is_integer:  # a folded float says more by its name in the model
                text = text.replace(str(symbol), source_name(_source(environment, symbol)))
        line = guard.sloc.maybe_user_loc
        lines.append(f"{text}  {line}" if line else text)
    return lines


def _source(environment: ShapeEnv, symbol: Expression) -> str:
    return environment.var_to_sources[symbol][0].name


def conditions(
    mode: FakeTensorMode, inputs: Sequence[tuple[str, object]]
) -> list[tuple[Size, tuple[str, ...]]]:
    """Assumptions about sizes and integers: conditions over v0, v1, ..., and where to read those.

    inputs: an expression and the fake of each input of the graph. Guards, and sizes that were equal when the graph
    was captured or are computed from others; sizes marked as unknown are equal only where that was said. Guards on
    floats are left out: a float is a constant of the graph. Raises SizeTextError for a guard without a written form.
    """
    environment = environment_of(mode)

    def numbered(expression: Expression, symbols: Sequence[Expression], start: int = 0) -> Size:
        return named(expression, {symbol: f"v{index}" for index, symbol in enumerate(symbols, start)})

    places: dict[Expression, str] = {}
    for source, example in inputs:
        if (symbol := plain_symbol(example)) is not None:
            places.setdefault(symbol, source)
    sizes = [
        (f"{source}.size()[{dim}]", size.node.expr)
        for source, example in inputs
        for dim, size in enumerate(example.shape if isinstance(example, torch.Tensor) else ())
        if isinstance(size, torch.SymInt)
    ]
    assumed: list[tuple[Size, tuple[str, ...]]] = []
    for place, expression in sizes:
        is_first = not expression.is_symbol or places.setdefault(expression, place) == place
        if not is_first and expression in environment.backed_var_to_val:
            assumed.append((parse_condition("v0 == v1"), (places[expression], place)))
    for place, expression in sizes:
        symbols = sorted(expression.free_symbols, key=str)
        if not expression.is_symbol and symbols and all(symbol in places for symbol in symbols):
            computed = numbered(expression, symbols, 1)
            assumed.append((parse_condition(f"v0 == {computed}"), (place, *map(places.__getitem__, symbols))))
    for guard in environment.guards:
        symbols = sorted(guard.expr.free_symbols, key=str)
        if all(symbol.is_integer for symbol in symbols):
            read = tuple(places.get(symbol) or _source(environment, symbol) for symbol in symbols)
            assumed += [(numbered(part, symbols), read) for part in conjuncts(guard.expr)]
    return assumed


def conditions_of(mode: FakeTensorMode, names: Mapping[Expression, str]) -> list[Size]:
    """Assumptions about the symbols of ``names`` so far, and the assertions that each call must check.

    Raises SizeTextError where one also speaks of other symbols or has no written form.
    """
    env = environment_of(mode)
    assertions = [assertion.expr for each in env.deferred_runtime_asserts.values() for assertion in each]
    assumed = [guard.expr for guard in env.guards if all(s.is_integer for s in guard.expr.free_symbols)]
    assumed += [expression for expression in assertions if expression.free_symbols <= set(names)]
    by_text: dict[str, Size] = {}
    for expression in assumed:
        # A symbol that turned out equal to another, or to a number, stands in no size that is asked for later: it has
        # no name. A symbol with a name is read somewhere, so that assumptions about it stay conditions.
        is_named = expression.free_symbols <= set(names)
        for part in conjuncts(expression if is_named else env.simplify(expression)):
            condition = named(part, names)
            by_text[str(condition)] = condition
    return list(by_text.values())
