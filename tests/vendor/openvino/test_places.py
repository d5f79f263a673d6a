"""Indices outside of what they index: a call raises what eager raises, and nothing is written into other memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dlinfer.errors import GraphRunError, OpArgumentError
from dlinfer.ops import fused_moe
from tests.vendor.openvino.lowering import lowered, same

aten = torch.ops.aten
x = torch.randn(5, 6)

# name: (function of a tensor and an index, the index, whether it counts from the end where it is negative)
READS_AND_WRITES: dict[str, tuple[Any, bool]] = {
    "index": (lambda a, i: a[i], True),
    "two indices": (lambda a, i: a[i, i], True),
    "index of a later dimension": (lambda a, i: a.t()[:, i], True),
    "index_select": (lambda a, i: a.index_select(0, i), False),
    "embedding": (lambda a, i: F.embedding(i, a), False),
    "gather": (lambda a, i: a.gather(0, i.unsqueeze(1)), False),
    "take_along_dim": (lambda a, i: torch.take_along_dim(a[:, 0], i), False),
    "take": (lambda a, i: a[:, 0].take(i), True),
    "index_put": (lambda a, i: a.index_put((i,), a[:2]), True),
    "index_put of two": (lambda a, i: a.index_put((i, i), a[0, :2]), True),
    "index_put that adds": (lambda a, i: a.index_put((i,), a[:2], accumulate=True), True),
    "index_copy": (lambda a, i: a.index_copy(0, i, a[:2]), False),
    "index_add": (lambda a, i: a.index_add(0, i, a[:2]), False),
    "index_fill": (lambda a, i: a.index_fill(0, i, 2.0), True),
    "scatter": (lambda a, i: a.scatter(0, i.unsqueeze(1), 2.0), False),
    "scatter_add": (lambda a, i: a.scatter_add(0, i.unsqueeze(1), a), False),
    "one_hot": (lambda a, i: a[0, :5] + F.one_hot(i, 5), False),
}


@pytest.mark.parametrize("computed", [False, True], ids=["given", "computed"])
@pytest.mark.parametrize("fixed", [(), (5, 6)], ids=["sizes vary", "sizes fixed"])
@pytest.mark.parametrize("name", READS_AND_WRITES)
def test_what_is_inside_is_torch_s_and_what_is_outside_raises(name: str, fixed: Any, computed: bool):
    function, counts_from_the_end = READS_AND_WRITES[name]

    def on(a, i):
        return function(a, i * 1 if computed else i)

    compiled, report = lowered(on, x, torch.tensor([0, 3]), fixed=fixed)
    assert not report.placed("eager")
    for good in ([0, 3], [4, 1], *([[-1, -5]] if counts_from_the_end else [])):
        index = torch.tensor(good)
        torch.testing.assert_close(compiled(x, index)[0], function(x, index))
    for bad in ([0, 5], [-6, 1], [2**31 - 1, 0], [0, -(2**31)], *([] if counts_from_the_end else [[-1, 0]])):
        index = torch.tensor(bad)
        with pytest.raises((IndexError, RuntimeError)) as eager:
            function(x, index)
        with pytest.raises(GraphRunError) as ours:
            compiled(x, index)
        assert type(ours.value.__cause__) is eager.type
        assert str(eager.value).splitlines()[0] in str(ours.value)


@pytest.mark.parametrize("computed", [False, True], ids=["given", "computed"])
def test_a_slot_outside_of_its_block_does_not_reach_the_next_block(computed: bool):
    """Block and slot are one index into the flat cache for OpenVINO."""

    def write(cache, block, slot, k):
        return cache.index_put_((block + 0 if computed else block, slot + 0 if computed else slot), k)

    cache, k = torch.zeros(6, 4, 3), torch.ones(1, 3)
    place = torch.tensor([1]), torch.tensor([2])
    compiled, _ = lowered(write, cache, *place, k)
    compiled(cache, *place, k)
    assert cache.sum() == cache[1, 2].sum() == 3
    cache.zero_()
    with pytest.raises(GraphRunError, match="index 5 is out of bounds"):
        compiled(cache, torch.tensor([0]), torch.tensor([5]), k)
    assert not cache.any()


def test_take_along_a_dimension_takes_indices_modulo_its_size():
    def along(a, i):
        return torch.take_along_dim(a, i, 0), torch.take_along_dim(a, i, 1)

    index = torch.tensor([[-6, -1, 0, 4, 5, 11]] * 5)
    same(along, x, index, others=[(x, index - 30)])


def test_no_indices_and_repeated_ones():
    function = lambda a, i: (a.index_put((i, i), a[0, 0], accumulate=True), a[i], a[i, i])  # noqa: E731
    compiled, _ = lowered(function, x, torch.tensor([0, 3]))
    for index in (torch.tensor([], dtype=torch.int64), torch.tensor([2, 2, -3, 2])):
        for one, other in zip(compiled(x, index), function(x, index), strict=True):
            torch.testing.assert_close(one, other)


def test_a_constant_outside_is_refused_when_it_is_lowered():
    index = torch.tensor([0, 7])
    with pytest.raises((IndexError, RuntimeError)):
        x[index]
    compiled, report = lowered(lambda a: a[index] * 2, x, fixed=(5, 6), fallback="allow")
    assert "index outside of -5..4" in str(report.refusals())
    with pytest.raises(GraphRunError, match="index 7 is out of bounds"):
        compiled(x)


@pytest.mark.parametrize("ids", [[[-1, 0]], [[3, 7]]])
def test_experts_that_there_are_not(ids: list[list[int]]):
    hidden, gate_up, down = torch.randn(1, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    weights, good = torch.rand(1, 2), torch.tensor([[3, 1]])

    def experts(h, g, d, w, i):
        return fused_moe(h, g, d, w, i, 2, True)

    compiled, _ = lowered(experts, hidden, gate_up, down, weights, good, fixed=(4, 8, 12, 6, 2))
    args = hidden, gate_up, down, weights
    torch.testing.assert_close(compiled(*args, good)[0], experts(*args, good))
    with pytest.raises(OpArgumentError, match="topk_ids"):
        compiled(*args, torch.tensor(ids))
