"""LMDeploy's sums over ranks: which of them ops.all_reduce computes, and the rows of a divided embedding."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ReduceOp

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.ranks import sums


@pytest.fixture
def summed(monkeypatch):
    """The groups over which tensors were summed; each sum adds 1."""
    groups: list[object] = []

    def all_reduce(x: torch.Tensor, group: object) -> torch.Tensor:
        groups.append(group)
        return x.add_(1)

    monkeypatch.setattr(activation, "_active", "cpu")
    monkeypatch.setattr(sums.ops, "all_reduce", all_reduce)
    return groups


def test_a_sum_is_the_ops(summed):
    call = sums._all_reduce.build(lambda *args: pytest.fail("LMDeploy's own"))
    x, group = torch.zeros(3), object()
    call(x, ReduceOp.SUM, group)
    call(x, group=group)
    assert summed == [group, group] and x.tolist() == [2, 2, 2]


@pytest.mark.parametrize(("op", "async_op"), [(ReduceOp.MAX, False), (ReduceOp.SUM, True)])
def test_other_calls_are_lmdeploys(op, async_op, summed):
    call = sums._all_reduce.build(lambda *args: args[1:])
    assert call(torch.zeros(3), op, None, async_op) == (op, None, async_op)
    assert summed == []


def test_rows_of_a_divided_embedding(summed):
    """Tokens 4 to 7 are here: other rows are 0 before the sum."""
    layer = SimpleNamespace(start_index=4, end_index=8)
    table = torch.arange(8.0).reshape(4, 2)
    call = sums._embedding.build(lambda *args: pytest.fail("LMDeploy's own"))
    out = call(layer, torch.tensor([[3, 4, 7, 8]]), table, True, "group")
    assert out.tolist() == [[[1, 1], [1, 2], [7, 8], [1, 1]]]
    assert summed == ["group"]


def test_devices_of_lmdeploys_own_sum_with_its_defaults(monkeypatch):
    monkeypatch.setattr(activation, "_active", None)
    calls = []
    sums._all_reduce.build(lambda *arguments: calls.append(arguments))("tensor")
    assert calls == [("tensor", torch.distributed.ReduceOp.SUM, "tp", False)]
