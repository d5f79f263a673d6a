"""Weights: read where torch has them, or built in and noticed when they change."""

from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

from tests.vendor.onnxruntime.regions import as_in_eager, compiled

X = torch.randn


def layer(x, weight, bias):
    return F.linear(x, weight, bias)


def addresses(run) -> set[int]:
    """What the only binding of a session run is bound to."""
    (binding,) = run._run._free
    return {address for address, _ in binding.bound.values()}


def test_a_weight_is_bound_where_it_lies_and_once():
    weight, bias = X(6, 4), X(6)
    run: Any = compiled(layer, X(3, 4), weight, bias, static=(1, 2)).run
    as_in_eager(lambda x: run(x, weight, bias), lambda x: layer(x, weight, bias), X(5, 4))
    assert {weight.data_ptr(), bias.data_ptr()} <= addresses(run)
    (binding,) = run._run._free
    calls = []
    bind = binding.binding.bind_input
    binding.binding.bind_input = lambda name, *rest: calls.append(name) or bind(name, *rest)
    given = X(7, 4)
    run(given, weight, bias)
    assert len(calls) == 1  # the weights are bound already


@pytest.mark.parametrize("kept", ["shared", "constant"])
def test_a_changed_weight_is_seen(kept):
    weight, bias = X(6, 4), X(6)
    result = compiled(layer, X(3, 4), weight, bias, static=(1, 2), weights=kept)
    x = X(5, 4)
    torch.testing.assert_close(result.run(x, weight, bias)[0], layer(x, weight, bias))
    weight.mul_(2)
    torch.testing.assert_close(result.run(x, weight, bias)[0], layer(x, weight, bias))
    other = X(6, 4)
    torch.testing.assert_close(result.run(x, other, bias)[0], layer(x, other, bias))
    seen = "compiled again because weights changed"
    assert [seen in note for note in result.notes] == ([True, True] if kept == "constant" else [])


@pytest.mark.parametrize("kept", ["shared", "constant"])
@pytest.mark.parametrize(
    "weight",
    [X(4, 6).t(), X(8, 6, 4)[2], X(6, 8)[:, ::2], X(1, 4).expand(6, 4)],
    ids=["transposed", "of a stack", "strided", "expanded"],
)
def test_a_weight_that_lies_otherwise(weight, kept):
    bias = X(6)
    result = compiled(layer, X(3, 4), weight, bias, static=(1, 2), weights=kept)
    as_in_eager(lambda x: result.run(x, weight, bias), lambda x: layer(x, weight, bias), X(5, 4))
    if kept == "shared" and weight.stride() in ((1, 6), (4, 1)):
        assert weight.data_ptr() in addresses(result.run)


def test_views_of_a_weight_are_bound_and_not_computed():
    """A fused projection cut in three, and a matrix used transposed."""
    packed, tall = X(18, 4), X(6, 5)

    def function(x, packed, tall):
        q, k, v = packed.split(6)
        return (x @ q.t() + x @ k.t() + x @ v.t()) @ tall.t().t()

    result = compiled(function, X(3, 4), packed, tall, static=(1, 2))
    as_in_eager(lambda x: result.run(x, packed, tall), lambda x: function(x, packed, tall), X(5, 4))
    step = packed[:6].nbytes
    assert {packed.data_ptr() + step * part for part in range(3)} <= addresses(result.run)


def test_experts_are_bound_one_by_one_and_only_chosen_ones_run():
    """Each expert's matrices are views of torch's stack; the others' memory is not even read."""
    gate_up, down = X(5, 12, 8), X(5, 8, 6)

    def function(x, gate_up, down, logits):
        weights, ids = torch.ops.dlinfer.moe_gating_topk_softmax(logits, 2, -1)
        return torch.ops.dlinfer.fused_moe(x, gate_up, down, weights, ids, 2, True)

    result = compiled(function, X(3, 8), gate_up, down, X(3, 5), static=(1, 2))
    for tokens in (3, 1, 4):
        as_in_eager(
            lambda x, logits: result.run(x, gate_up, down, logits),
            lambda x, logits: function(x, gate_up, down, logits),
            X(tokens, 8),
            X(tokens, 5),
        )
    assert {gate_up[index].data_ptr() for index in range(5)} <= addresses(result.run)
    gate_up[4] = torch.nan
    (given,) = result.run(X(2, 8), gate_up, down, torch.tensor([[9.0, 8, 0, 0, -9]]).expand(2, 5))
    assert given.isfinite().all()


def test_a_weight_that_is_written_is_no_weight():
    def function(x, running):
        running.mul_(0.5)
        return x + running

    running = X(4)
    result = compiled(function, X(3, 4), running, static=(1,), weights="constant")
    expected = running * 0.5
    x = X(5, 4)
    (given,) = result.run(x, running)
    torch.testing.assert_close(given, x + expected)
    torch.testing.assert_close(running, expected)


def test_constants_of_the_graph_go_with_the_model():
    table = torch.tensor(numpy.arange(8, dtype=numpy.float32))

    def function(x):
        return x * table.sum() + table[: x.shape[0], None]

    as_in_eager(compiled(function, X(3, 4)).run, function, X(5, 4))
