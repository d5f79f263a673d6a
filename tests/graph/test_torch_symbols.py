"""The private parts of torch about symbolic sizes, each on a small case."""

import pytest
import torch
from torch import fx

from dlinfer.graph import torch_seam
from dlinfer.graph.torch_symbols import number_node

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
    mode = torch_seam.fresh_mode()
    a, b = mode.from_tensor(torch.ones(7, 3)).shape
    number = EXPRESSIONS[name](a, b)
    graph = fx.Graph()
    nodes = {torch_seam.plain_symbol(size): graph.placeholder(text) for text, size in (("a", a), ("b", b))}
    graph.output(number_node(graph, number, nodes))
    run = fx.GraphModule({}, graph)
    for given in ((7, 3), (12, 5), (2, 9)):
        assert run(*given) == EXPRESSIONS[name](*given)
