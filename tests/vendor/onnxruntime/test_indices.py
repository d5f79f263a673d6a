"""An index outside of what it indexes raises as in eager mode; a negative one counts from the end where torch's do."""

import pytest
import torch
import torch.nn.functional as F

from dlinfer.graph.onnx.torch_semantics import refuse_negative
from dlinfer.ops import fused_moe
from tests.vendor.onnxruntime.regions import as_in_eager, compiled, subgraph

ROWS, NEW = torch.randn(5, 4), torch.randn(3, 4)


def wide(index):
    return index[:, None].expand(-1, 4)


READING = {
    "embedding": lambda table, at: F.embedding(at, table) * 2,
    "index_select": lambda table, at: table.index_select(0, at) * 2,
    "gather": lambda table, at: table.gather(0, wide(at)) * 2,
    "a computed index": lambda table, at: F.embedding(at * 2 - at, table),
    "index": lambda table, at: table[at] * 2,
    "two indices": lambda table, at: table[at, at - at] * 2,
    "take": lambda table, at: table.take(at) * 2,
}
WRITING = {
    "index_copy": lambda table, at: table.index_copy(0, at, NEW),
    "index_add": lambda table, at: table.index_add(0, at, NEW),
    "index_fill": lambda table, at: table.index_fill(0, at, 3.0),
    "index_put": lambda table, at: table.index_put((at,), NEW),
    "scatter": lambda table, at: table.scatter(0, wide(at), 1.0),
    "scatter_add": lambda table, at: table.scatter_add(0, wide(at), NEW),
    "scatter_reduce": lambda table, at: table.scatter_reduce(0, wide(at), NEW, "sum"),
}


@pytest.mark.parametrize("name", [*READING, *WRITING])
def test_indices_are_those_of_torch(name):
    function = {**READING, **WRITING}[name]
    run = compiled(function, ROWS, torch.tensor([0, 1, 2]), fixed=True).run
    for at in ([4, 0, 3], [-1, 0, 2], [0, 5, 1], [0, 500, 1], [-5, 1, 3], [-21, 1, 3]):
        index = torch.tensor(at)
        try:
            function(ROWS.clone(), index)
        except (IndexError, RuntimeError):
            with pytest.raises((IndexError, RuntimeError)):
                run(ROWS.clone(), index)
        else:
            as_in_eager(run, function, ROWS, index)


@pytest.mark.parametrize("ignored", [-100, -1, 2])
def test_targets_of_losses(ignored):
    """One target is ignored, another negative one is refused."""
    x = torch.randn(4, 6)

    def losses(x, target):
        logarithms = F.log_softmax(x, -1)
        return (
            F.cross_entropy(x, target, ignore_index=ignored),
            F.nll_loss(logarithms, target, ignore_index=ignored),
        )

    run = compiled(losses, x, torch.tensor([0, 1, 3, 5]), fixed=True).run
    for wrong in (0, ignored, -1, -100, -7, 6, 10**8):
        target = torch.tensor([0, 1, wrong, 5])
        try:
            losses(x, target)
        except (IndexError, RuntimeError):
            with pytest.raises((IndexError, RuntimeError)):
                run(x, target)
        else:
            as_in_eager(run, losses, x, target)


def test_targets_that_are_probabilities_are_no_indices():
    graph = subgraph(F.cross_entropy, torch.randn(4, 6), torch.rand(4, 6), fixed=True).graph_module.graph
    before = [node.name for node in graph.nodes]
    refuse_negative(graph)
    assert [node.name for node in graph.nodes] == before


def test_nothing_is_written_for_a_wrong_index():
    def write(cache, at, new):
        cache.index_copy_(0, at, new)
        return cache * 2

    cache, at = ROWS.clone(), torch.tensor([1, 2, 3])
    run = compiled(write, cache, at, NEW, fixed=True).run
    for wrong in ([0, 1, -1], [0, 1, 5]):
        with pytest.raises((IndexError, RuntimeError)):
            run(cache, torch.tensor(wrong), NEW)
    assert torch.equal(cache, ROWS)


@pytest.mark.parametrize("static", [(), (1, 2)])
def test_ids_name_experts(static):
    """With the weights of all experts in one tensor, and with each expert's own."""

    def layer(x, gate_up, down, weights, ids):
        return fused_moe(x, gate_up, down, weights, ids, 2, False)

    x, gate_up, down = torch.randn(3, 8), torch.randn(4, 16, 8), torch.randn(4, 8, 8)
    weights, ids = torch.rand(3, 2), torch.tensor([[0, 1], [3, 2], [1, 0]])
    given = (x, gate_up, down, weights, ids)
    run = compiled(layer, *given, static=static, fixed=True).run
    as_in_eager(run, layer, *given, tolerance=1e-4)
    for wrong in (-1, 4):
        ids[1, 0] = wrong
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            run(*given)
