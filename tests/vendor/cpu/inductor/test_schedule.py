"""The order in which a region runs: as late as writes allow, equal layers alike, kernels in the model's order."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.node import map_arg

from dlinfer.graph.ir.dialect import op_name
from dlinfer.vendor.cpu.inductor.schedule import Cluster, schedule
from tests.graph.passes.fusion.capturing import CapturedGraph, captured


def scheduled(function, *args, smallest: int = 2) -> tuple[CapturedGraph, list]:
    one = captured(function, *args, dynamic=False)
    return one, schedule(one.graph_module.graph, smallest=smallest)


def text(items) -> list[str]:
    """Kernels by name; clusters as the names of their members."""

    def name(node: fx.Node) -> str:
        return op_name(node).split(".")[1]

    return [f"[{' '.join(map(name, i.members))}]" if isinstance(i, Cluster) else name(i) for i in items]


def run(one: CapturedGraph, items) -> tuple:
    """Run the items in their order, each cluster's body as a whole that sees its inputs only."""
    values: dict[fx.Node, object] = {}
    for node, given in zip(one.graph_module.graph.find_nodes(op="placeholder"), one.inputs, strict=True):
        values[node] = given.clone() if isinstance(given, torch.Tensor) else given

    def call(node: fx.Node, known: dict) -> object:
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        target: Any = node.target
        return target(*args, **kwargs)

    for item in items:
        if isinstance(item, Cluster):
            inside = set(item.body)
            known = {p: values[p] for node in item.body for p in node.all_input_nodes if p not in inside}
            for node in item.body:
                known[node] = call(node, known)
            values |= {node: known[node] for node in item.outputs}
        else:
            values[item] = call(item, values)
    results: Any = one.graph_module.graph.output_node().args[0]
    return tuple(values[node] for node in results)


def right(function, *args, smallest: int = 1) -> list[str]:
    """The schedule as text, after its numbers were compared with eager's."""
    copies = [arg.clone() for arg in args]
    expected = function(*copies)
    expected = expected if isinstance(expected, tuple) else (expected,)
    one, items = scheduled(function, *[arg.clone() for arg in args], smallest=smallest)
    with torch.no_grad():
        torch.testing.assert_close(run(one, items), expected)
    return text(items)


x, w = torch.arange(24.0).view(4, 6) / 7, torch.arange(36.0).view(6, 6) / 9


def test_loops_between_kernels_come_together_and_late():
    def model(x, w):
        early = x * 2 + 1  # used at the very end
        a = F.linear(x.sin() * 2, w)
        b = F.linear(a.cos() + 1, w)
        return b * early

    assert right(model, x, w) == ["[sin mul]", "linear", "[cos add]", "linear", "[mul add mul]"]


def test_loops_do_not_move_over_a_write_to_what_they_read():
    def model(x, w):
        early = x * 2 + 1
        x.add_(10)
        return F.linear(x, w) * early

    assert right(model, x, w) == ["[mul]", "add_", "linear", "[add mul]"]


def test_nor_over_a_write_through_a_view_or_to_another_input():
    def through_a_view(x, w):
        early = x.t() * 2
        x[1:].mul_(3)
        return early.t() + x

    def another_input(x, w):
        early = w.sum() * 2
        x.mul_(3)
        return early + x

    assert right(through_a_view, x, w) == ["slice", "[mul]", "mul_", "[add]"]
    assert right(another_input, x, w) == ["[sum]", "mul_", "[mul add]"]


def test_loops_behind_a_write_stay_behind_it():
    def model(x, w):
        y = F.linear(x, w)
        y.add_(1)
        z = y * 2
        y.mul_(5)
        return z + 1, y.sin()

    assert right(model, x, w) == ["linear", "add_", "[mul]", "mul_", "[add sin]"]


def test_numbers_read_from_memory_do_not_move_over_a_write():
    def model(x, n):
        k = n.item()
        n.add_(1)
        return (x * k).sin()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        _, items = scheduled(model, x, torch.tensor(3.0), smallest=1)
    assert text(items)[:2] == ["item", "add_"]


def test_views_of_what_is_reshaped_in_place_keep_their_place():
    def model(x, w):
        y = F.linear(x, w)
        flat = y.view(-1)
        y.t_()
        return flat.sin() + 1, torch.mm(y, x), flat

    order = right(model, x, w)
    assert order.index("view") < order.index("t_")


def test_items_of_a_tuple_go_where_it_goes():
    def model(x, w):
        low, high = torch.aminmax(x * 2, dim=-1)
        y = F.linear(x, w)
        return (y - low[:, None]) * high[:, None]

    order = right(model, x, w)
    assert order[0] == "linear"
    assert len(order) == 2
    assert "getitem getitem" in order[1]


def test_items_of_a_kernels_tuple_are_views():
    def model(x):
        values, places = (x * 2).sort()
        return values + 1, places

    assert right(model, x) == ["[mul]", "sort", "getitem", "[add]", "getitem"] or right(model, x)[:2] == [
        "[mul]",
        "sort",
    ]


def test_views_come_along_into_the_cluster():
    def model(x, w):
        y = F.linear(x, w)
        a, b = y.split(3, -1)
        return F.silu(a) * b.contiguous()

    _, items = scheduled(model, x, w, smallest=1)
    (cluster,) = [item for item in items if isinstance(item, Cluster)]
    inside = [op_name(node).split(".")[1] for node in cluster.body]
    assert any("split" in name for name in inside)
    assert text(items)[0] == "linear"
    assert len(items) == 2, "nobody else needs the views"
    right(model, x, w)


def test_views_of_a_clusters_results_come_after_it():
    def model(x, w):
        return F.linear((x * 2 + 1).view(6, 4).t(), w)

    assert right(model, x, w)[0] == "[mul add]"


def test_what_nobody_needs_is_left_out_and_effects_are_not():
    def model(x, w):
        F.linear(x, w).view(-1)
        x.add_(1)
        torch.rand(2)
        return x * 2

    assert right(model, x, w) == ["add_", "rand", "[mul]"]


def test_kernels_keep_their_order_and_so_do_draws():
    def model(x, w):
        a = torch.rand(6)
        y = F.linear(x, w)
        b = torch.randn(6)
        y.add_(a)
        c = torch.rand(6)
        z = F.linear(y, w)
        return c + b, z

    kernels = [item for item in text(scheduled(model, x, w)[1]) if not item.startswith("[")]
    assert kernels == ["rand", "linear", "randn", "add_", "rand", "linear", "add"]


@pytest.mark.parametrize(("smallest", "clusters"), [(1, 2), (2, 1), (4, 0)])
def test_few_loops_stay_single_nodes(smallest, clusters):
    def model(x, w):
        return F.linear(x * 2, w).sin() * 3 + 1

    _, items = scheduled(model, x, w, smallest=smallest)
    assert sum(isinstance(item, Cluster) for item in items) == clusters


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def test_layers_that_repeat_give_equal_clusters():
    _, items = scheduled(nn.Sequential(*[Layer() for _ in range(4)]), x, smallest=1)
    clusters = [item for item in text(items) if item.startswith("[")]
    assert clusters == ["[layer_norm]", *["[silu]", "[add layer_norm]"] * 3, "[silu]", "[add]"]
