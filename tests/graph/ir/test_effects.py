"""Which memory is written when."""

import pytest
import torch
from torch import fx, nn

from dlinfer.graph.ir.dialect import op_name
from dlinfer.graph.ir.effects import Writes
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
    writes = Writes(graph)
    y = found["mul"]
    assert writes.between([y], found["sum"], found["sum1"])
    assert writes.between([y], found["sum1"], found["sum"]), "the order of the two does not matter"
    assert not writes.between([y], found["add_"], found["sum1"]), "both ends are excluded"
    assert not writes.between([found["l_x_"]], found["sum"], found["sum1"])
    assert (writes.epoch_at(y, found["sum"]), writes.epoch_at(y, found["sum1"])) == (0, 1)
    assert writes.epoch(found["sin"]) == 0
    assert writes.ever(y)
    assert not writes.ever(found["sin"])


def test_inputs_may_share_memory_at_a_later_call():
    def model(a, b):
        before = b.sum()
        a.add_(1)
        return before, b.sum()

    graph, found = graph_of(model, torch.ones(3), torch.ones(3))
    assert Writes(graph).between([found["l_b_"]], found["sum"], found["sum1"])


def test_parameters_do_not():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, a):
            before = self.weight.sum()
            a.add_(1)
            return before, self.weight.sum()

    graph, found = graph_of(Model(), torch.ones(3))
    weight = next(node for name, node in found.items() if "weight" in name)
    assert not Writes(graph).between([weight], found["sum"], found["sum1"])
    assert not Writes(graph).ever(weight)
