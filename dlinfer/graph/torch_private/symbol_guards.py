"""Guards: the assumptions about symbols that were made while a graph was traced or compiled."""

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
    """Return the guards on the symbols of a mode, each as text of ``sympy.srepr``."""
    return [sympy.srepr(guard.expr) for guard in environment_of(mode).guards]


def guard_all(
    guards: Sequence[str], original: Mapping[Expression, Expression], environment: ShapeEnv | None
) -> bool:
    """Check guards that were made in another fake mode, and add them to the original symbols.

    Return True if all guards hold for the hints. Otherwise add none of them, and return False.
    guards: texts from ``guards_of``.
    original: symbol of the other mode -> the original symbol, which belongs to ``environment``.
    """
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
    # Check all guards first: to evaluate a false guard would guard the graph by the guard's contrary.
    if any(guard.xreplace(environment.backed_var_to_val) != sympy.true for guard in conditions):
        return False
    return all(map(environment.evaluate_expr, conditions))


def shape_guards(mode: FakeTensorMode) -> list[str]:
    """Return each guard as text: its condition and, if torch knows it, the line of the model that caused the guard.

    The guards are on sizes, and on floats that became constants.
    """
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
    """Return the assumptions about sizes and integers, as pairs (condition, sources).

    In a condition, v0 stands for the first source, v1 for the second, and so on.
    inputs: a pair (source expression, fake) for each input of the graph.

    The conditions are

    - guards, except guards on floats, because a float is a constant of the graph;
    - equalities of backed sizes that were equal at capture (unbacked sizes are equal only by a guard);
    - equalities of sizes that were computed from other sizes.

    Raises SizeTextError for a guard that cannot be written as a condition's text.
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
    """Return the conditions that each call of the graph must meet: torch's guards so far, and its runtime assertions.

    Guards on floats are left out, and so are assertions with a symbol that is not in ``names``.
    names: symbol -> its name in the conditions.
    Raises SizeTextError for a guard with a symbol that is not in ``names``, or that cannot be written as text.
    """
    env = environment_of(mode)
    assertions = [assertion.expr for each in env.deferred_runtime_asserts.values() for assertion in each]
    assumed = [guard.expr for guard in env.guards if all(s.is_integer for s in guard.expr.free_symbols)]
    assumed += [expression for expression in assertions if expression.free_symbols <= set(names)]
    by_text: dict[str, Size] = {}
    for expression in assumed:
        # If a symbol turned out equal to another symbol or to a number, no later size contains it, and it has no name.
        # A symbol with a name is read from an input, so assumptions about it stay conditions.
        is_named = expression.free_symbols <= set(names)
        for part in conjuncts(expression if is_named else env.simplify(expression)):
            condition = named(part, names)
            by_text[str(condition)] = condition
    return list(by_text.values())
