"""Fake modes, and tracing on fake tensors."""

import pytest
import torch

from dlinfer.graph.torch_private import fake_mode, inductor
from tests.graph.torch_private.fakes import fakes


def test_tracing_before_dispatch_and_below():
    mode = fake_mode.fresh_mode()
    x, w = mode.from_tensor(torch.ones(2, 3)), mode.from_tensor(torch.ones(3, 3))

    def model(x, w):
        x.add_(1)
        return torch.nn.functional.linear(x, w) + torch.ones(1)

    def calls(graph):
        return [str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function"]

    coarse = calls(fake_mode.trace_coarse(model, [x, w], mode))
    assert {"linear", "add_"} <= set(coarse)
    assert "linear" not in calls(fake_mode.trace_coarse(model, [x, w], mode, decomposed=True))

    def silu_of(x):
        return torch.nn.functional.silu(x)

    table = inductor.decompositions()
    assert torch.ops.aten.silu.default in table
    silu = fake_mode.trace_decomposed(silu_of, [x], mode, table)
    assert "silu" not in calls(silu)
    assert fake_mode.mode_of([3, x]) is mode


def test_no_op_runs_for_real_on_fakes():
    mode, _, _ = fakes()
    with mode, pytest.raises(Exception, match=r"[Ff]ake"):
        _ = torch.add(torch.ones(2), 1) + torch.Tensor(2).new_tensor([1.0]).__class__(torch.ones(2).storage())


def test_sizes_of_an_example_are_symbols_of_their_own():
    x = fake_mode.with_symbols(fake_mode.fresh_mode(), torch.ones(3, 3, 8), (0, 1))
    assert [isinstance(size, torch.SymInt) for size in x.shape] == [True, True, False]
    assert str(x.shape[0]) != str(x.shape[1])
