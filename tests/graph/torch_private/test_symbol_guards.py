"""Guards of a compilation, and what holds of its sizes."""

import pytest
import torch

from dlinfer.graph.torch_private import dynamo, symbol_guards, symbols
from dlinfer.graph.torch_private.expressions import SizeTextError, parse_size, to_size
from dlinfer.graph.torch_private.symbol_guards import conditions_of
from tests.graph.torch_private.asking import asked_in_backend, dynamo_mode, tall
from tests.graph.torch_private.fakes import fakes


def test_shape_guards_give_condition_and_line():
    found = asked_in_backend(lambda: symbol_guards.shape_guards(dynamo_mode()), tall, torch.ones(5, 7))
    assert any("> 3" in guard and "x.shape[0] > 3" in guard for guard in found)


def test_conditions_say_what_holds_and_where_to_read_it():
    seen = []

    def backend(graph_module, example_inputs):
        examples = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
        named = list(zip(dynamo.input_sources(graph_module.graph), examples, strict=True))
        seen.append(symbol_guards.conditions(dynamo_mode(), named))
        tensors = [value for value in examples if isinstance(value, torch.Tensor)]
        seen.append([list(map(symbols.fixed_size, value.shape)) for value in tensors])
        return graph_module.forward

    def function(x, y):
        return x.view(-1, 7) * 2 + y.sum() if x.shape[1] == 7 and x.shape[0] > 3 else x

    dynamo.compile_apart(function, backend, True)(torch.ones(5, 7), torch.ones(5))
    found, sizes = [(str(condition), read) for condition, read in seen[0]], seen[1]
    assert ("v0 == v1", ("L['x'].size()[0]", "L['y'].size()[0]")) in found
    assert ("v0 > 3", ("L['x'].size()[0]",)) in found
    assert ("v0 == 7", ("L['x'].size()[1]",)) in found
    assert sizes == [[None, 7], [None]]


def test_sizes_and_conditions_are_translated():
    mode, made, _ = fakes(a=(2, 64, 6), b=(2, 64, 8))
    a, b = made["a"], made["b"]
    names = {value.node.expr: name for name, value in made.items()}
    for value, text in [(a * b, "a * b"), ((a + 3) // 4, "(a + 3) // 4"), (a % 5, "a % 5"), (a * a, "a * a")]:
        size = to_size(value, names)
        for one, other in ((6, 8), (13, 9)):
            given = {"a": one, "b": other}
            assert size.evaluate(given) == parse_size(text).evaluate(given)
    assert to_size(5, names).fixed == 5
    with pytest.raises(SizeTextError, match="no input has the size"):
        to_size(a, {})
    assert bool(a < b)
    assert bool(a % 3 == 0)
    found = conditions_of(mode, names)
    assert all(one.evaluate({"a": 6, "b": 8}) for one in found)
    assert not all(one.evaluate({"a": 7, "b": 8}) for one in found)
    assert not all(one.evaluate({"a": 9, "b": 8}) for one in found)
