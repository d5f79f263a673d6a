"""The private parts of torch about symbolic sizes, each on a small case."""

import math
from typing import Any

import pytest
import sympy
import torch
from torch import fx

from dlinfer.graph.torch_private import fake_mode, symbols
from dlinfer.graph.torch_private.expressions import (
    SizeTextError,
    bounds_of,
    conjuncts,
    named,
    number_node,
    parse_condition,
    parse_size,
    to_size,
    value_range,
)

EXPRESSIONS = {
    "sum": lambda a, b: a + b + 1,
    "product": lambda a, b: 2 * a * b,
    "quotient": lambda a, b: (a * 4) // b,
    "remainder": lambda a, b: (a + 5) % b,
    "largest": torch.sym_max,
    "difference": lambda a, b: a - 2 * b,
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_number_is_written_over_its_symbols(name):
    mode = fake_mode.fresh_mode()
    a, b = mode.from_tensor(torch.ones(7, 3)).shape
    number = EXPRESSIONS[name](a, b)
    graph = fx.Graph()
    nodes = {symbols.plain_symbol(size): graph.placeholder(text) for text, size in (("a", a), ("b", b))}
    graph.output(number_node(graph, number, nodes))
    run = fx.GraphModule({}, graph)
    for given in ((7, 3), (12, 5), (2, 9)):
        assert run(*given) == EXPRESSIONS[name](*given)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_number_as_text(name):
    a, b = fake_mode.fresh_mode().from_tensor(torch.ones(7, 3)).shape
    size = to_size(EXPRESSIONS[name](a, b), {symbols.plain_symbol(a): "a", symbols.plain_symbol(b): "b"})
    for given in ((7, 3), (12, 5), (2, 9)):
        for one in (size, parse_size(str(size))):
            assert one.evaluate(dict(zip("ab", given, strict=True))) == EXPRESSIONS[name](*given)


def test_a_symbol_that_is_not_given_has_no_name():
    (a,) = fake_mode.fresh_mode().from_tensor(torch.ones(7)).shape
    with pytest.raises(SizeTextError, match="no input has the size"):
        to_size(a + 1, {})


@pytest.mark.parametrize(
    "text", ["trunc(2.5*(s0 + 1))", "floor(s0 / 4)", "ceil(0.3*s0 + s1)", "trunc(s0*1.0e-05)"]
)
def test_floats_are_rounded_as_python_does(text):
    size = parse_size(text)
    scope = {"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil}
    for s0, s1 in ((3, 4), (7, 1), (123457, 9)):
        given = {"s0": s0, "s1": s1}
        expected = eval(text, scope, given)
        assert size.evaluate(given) == parse_size(str(size)).evaluate(given) == expected
        wide = fake_mode.fresh_mode().from_tensor(torch.ones(2, 3), static_shapes=False).shape
        assert isinstance(size.evaluate(dict(zip(("s0", "s1"), wide, strict=True))), torch.SymInt)


def test_a_condition_is_taken_apart():
    a: Any
    b: Any
    a, b = fake_mode.fresh_mode().from_tensor(torch.ones(7, 3)).shape
    both = sympy.And((a > 4).node.expr, (b != a).node.expr)
    names = {symbols.plain_symbol(a): "a", symbols.plain_symbol(b): "b"}
    assert sorted(str(named(part, names)) for part in conjuncts(both)) == ["a > 4", "b != a"]
    assert not conjuncts(sympy.true)


def test_attention_scales_are_written_and_read_back():
    for text in ("pow(s0, -0.5) == 0.25", "1 / sqrt(s0) == 0.25"):
        condition = parse_condition(text)
        assert condition.evaluate({"s0": 16}) == True  # noqa: E712 - a condition may give sympy's or torch's bool
        assert condition.evaluate({"s0": 4}) == False  # noqa: E712
        assert str(parse_condition(str(condition))) == str(condition)


def test_ranges_have_open_ends():
    for bounds in ((2, 9), (0, None), (None, None)):
        assert bounds_of(value_range(*bounds)) == bounds
