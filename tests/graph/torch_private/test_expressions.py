"""The private parts of torch about symbolic sizes, each on a small case."""

import operator

import pytest
import torch
from torch import fx

from dlinfer.graph.torch_private import fake_mode, symbols
from dlinfer.graph.torch_private.expressions import number_node, number_tree

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
def test_a_number_as_plain_data(name):
    a, b = fake_mode.fresh_mode().from_tensor(torch.ones(7, 3)).shape
    tree = number_tree(EXPRESSIONS[name](a, b), {symbols.plain_symbol(a): "a", symbols.plain_symbol(b): "b"})
    for given in ((7, 3), (12, 5), (2, 9)):
        assert evaluated(tree, dict(zip("ab", given, strict=True))) == EXPRESSIONS[name](*given)


def evaluated(tree, given):
    """What plain data means, by operations of Python."""
    if isinstance(tree, (int, str)):
        return given.get(tree, tree)
    kind, one, other = tree
    function = {"min": min, "max": max}.get(kind) or getattr(operator, kind)
    return function(evaluated(one, given), evaluated(other, given))


def test_a_symbol_that_is_not_given_has_no_place_in_plain_data():
    (a,) = fake_mode.fresh_mode().from_tensor(torch.ones(7)).shape
    with pytest.raises(KeyError):
        number_tree(a + 1, {})
