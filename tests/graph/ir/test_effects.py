"""Which memory is written when."""

import pytest
import torch
from torch import fx, nn

from dlinfer.graph.ir.dialect import op_name, storages, written_arguments
from dlinfer.graph.ir.effects import effects_of, has_layout, layout_to_keep
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


class Feeds(nn.Module):
    """Gives a view of a buffer that it writes, which a caller may pass in again."""

    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor
        self.register_buffer("state", torch.zeros(3))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, h):
        before = h.sum()
        self.state.add_(1)
        h.sin_()
        return before, h.sum() + self.weight.sum(), self.state[:]


def test_what_was_there_before_may_be_one_memory_at_a_later_call():
    """A changing input may be a buffer's or a parameter's view, which an earlier call or the module gave out."""
    graph, found = graph_of(Feeds(), torch.ones(3))
    effects = effects_of(graph)
    state, weight = (
        next(node for name, node in found.items() if word in name) for word in ("state", "weight")
    )
    assert effects.written_between([found["l_h_"]], found["sum"], found["sin_"])
    assert effects.written_between([weight], found["sum"], found["sum1"])
    assert [effects.is_written(node) for node in (found["l_h_"], state, weight)] == [True, True, False]
    assert effects.writes(found["add_"]) == effects.outside


def test_wider_numbers_are_never_seen_as_bools_and_bytes_may_be_seen_as_either():
    def model(cache, mask, levels):
        cache.add_(1)
        levels.mul_(2)
        return mask.sum(), cache.sum()

    graph, found = graph_of(model, torch.ones(3), torch.ones(3) > 0, torch.ones(3, dtype=torch.uint8))
    effects = effects_of(graph)
    cache, mask, levels = (
        frozenset({*storages(found[name])}) for name in ("l_cache_", "l_mask_", "l_levels_")
    )
    assert effects.shared_with(cache) == cache | levels
    assert effects.shared_with(mask) == mask | levels
    assert effects.shared_with(levels) == cache | mask | levels


def test_effects_are_worked_out_once_and_anew_when_the_graph_has_changed():
    def model(x, y):
        x.add_(1)
        return x * y

    graph, found = graph_of(model, torch.ones(3), torch.ones(3))
    effects = effects_of(graph)
    assert effects_of(graph) is effects
    kept = found["mul"].args
    found["mul"].args = (found["l_y_"], found["l_x_"])
    other = effects_of(graph)
    assert other is not effects
    found["mul"].args = kept
    assert effects_of(graph) is not other
    found["mul"].meta["val"] = found["mul"].meta["val"].clone()
    assert effects_of(graph) is not other
    found["mul"].replace_all_uses_with(found["l_x_"])
    graph.erase_node(found["mul"])
    assert found["mul"] not in effects_of(graph).position


def test_results_in_memory_of_their_own_are_laid_out_and_others_are_where_they_are():
    def model(x, w):
        product = torch.mm(x, w)
        first, second = torch.split(product.t(), 2)
        values, places = product.sort()
        return first, second, values, places, torch.mm(w, x.t()).t(), x.sum()

    _, found = graph_of(model, torch.ones(4, 3), torch.ones(3, 3))
    assert [layout_to_keep(found[name]) for name in ("mm", "mm1", "getitem2", "getitem3")] == [(0, 1)] * 4
    for name in ("l_x_", "t", "split", "getitem", "sort", "sum"):
        assert layout_to_keep(found[name]) is None
        assert has_layout(found[name])


def test_a_branch_that_writes_is_a_write_of_what_it_is_given():
    def adds(x):
        x.add_(1)
        return x.sum()

    def model(flag, x, y):
        return torch.cond(flag, adds, lambda x: x.sum() * 2, (x,)), y * 2

    graph, _ = graph_of(model, torch.tensor(True), torch.ones(3), torch.ones(3))
    [written] = [node for node in graph.nodes if written_arguments(node)]
    assert "cond" in str(written.target)
