"""Which memory is written when."""

import pytest
import torch
from torch import fx

from dlinfer.graph.ir.dialect import op_name
from dlinfer.graph.ir.effects import effects_of
from tests.graph.passes.fusion.capturing import captured

pytestmark = pytest.mark.usefixtures("graph_mode")


def graph_of(function, *args) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A captured graph, and its nodes by the op's name, numbered where it comes again."""
    graph = captured(function, *args, dynamic=False).graph_module.graph
    found: dict[str, fx.Node] = {}
    for node in graph.nodes:
        name = op_name(node).split(".")[1] if node.op == "call_function" else node.name
        found[f"{name}{sum(key.rstrip('0123456789') == name for key in found) or ''}"] = node
    return graph, found


def test_writes_through_views_count_for_all_of_the_memory():
    def model(x):
        y = x * 2
        first = y.sum()
        y[1].add_(1)
        second = y.sum()
        return first, second, x.sin()

    graph, found = graph_of(model, torch.ones(3, 4))
    effects = effects_of(graph)
    y = found["mul"]
    assert effects.written_between([y], found["sum"], found["sum1"])
    assert effects.written_between([y], found["sum1"], found["sum"]), "the order of the two does not matter"
    assert not effects.written_between([y], found["add_"], found["sum1"]), "both ends are excluded"
    assert not effects.written_between([found["l_x_"]], found["sum"], found["sum1"])
    assert (effects.writes_before(y, found["sum"]), effects.writes_before(y, found["sum1"])) == (0, 1)
    assert effects.writes_before(found["sin"], found["sin"]) == 0
    assert effects.ever_written(y)
    assert not effects.ever_written(found["sin"])


def test_inputs_may_share_memory_at_a_later_call():
    def model(a, b):
        before = b.sum()
        a.add_(1)
        return before, b.sum()

    graph, found = graph_of(model, torch.ones(3), torch.ones(3))
    assert effects_of(graph).written_between([found["l_b_"]], found["sum"], found["sum1"])
