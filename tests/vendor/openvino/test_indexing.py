"""Reading and writing by index: negative indices, several of them, broadcasting, and what is out of reach."""

import pytest
import torch
import torch.nn.functional as F

from dlinfer.errors import GraphRunError
from tests.vendor.openvino.lowering import lowered, same

put = torch.ops.aten.index_put.default  # the method takes no None
x = torch.randn(5, 6, 4)
rows = torch.tensor([3, 0, -1, 2])
# Equal sizes are one symbol: there are as many rows as elements of the last dimension.
others = ((torch.randn(8, 7, 5), torch.tensor([1, -5, 6, 0, 2])),)


def test_reading():
    same(lambda a, i: (a[i], a[:, i], a[i, :, 1], a[..., i - i]), x, rows, others=others)
    same(
        lambda a, i: (a[i, i], a[:, i, i.abs() % 4], a[i, :, i.abs() % 4], a[i[:, None], i]),
        x,
        rows,
        others=others,
    )
    same(lambda a, i: (a.index_select(1, i.abs()), a.take(i.abs())), x, rows, others=others)
    same(lambda a, i: a[i.view(2, 2)], x, rows)


def test_no_indices():
    """The plugin divides by the number of indices where it is known to be 0."""
    none = torch.zeros(0, dtype=torch.int64)
    same(lambda a, i: (a[i], a[:, i], a[i, i], a.index_select(2, i), torch.cat((a[i], a * 2))), x, none)
    same(lambda a, i: (a.gather(1, i.view(0, 1, 1)), F.embedding(i, a[0]), a.take(i) + 1), x, none)


def test_gather():
    index = torch.randint(3, (5, 6, 2))
    same(lambda a, i: (a.gather(2, i), a.gather(0, i), a.gather(1, i[:2])), x, index)
    same(lambda a, i: torch.take_along_dim(a, i, 2), x, index)


def test_embedding():
    table, ids = torch.randn(11, 6), torch.randint(11, (2, 5))
    same(lambda w, i: F.embedding(i, w), table, ids, others=[(table, torch.randint(11, (4, 9)))])
    same(lambda w, i: F.embedding(i, w, padding_idx=0), table, ids.int())


@pytest.mark.parametrize("bad", [11, -12, 2**40])
def test_an_index_out_of_reach_raises_as_eager_does(bad):
    """OpenVINO alone would read zeros."""
    compiled, _ = lowered(
        lambda w, i: F.embedding(i, w) * 2, torch.randn(11, 6), torch.randint(11, (2, 5)), fallback="allow"
    )
    # The number of rows is a symbol above, so that nothing is known when it is compiled.
    fixed, _ = lowered(
        lambda w, i: F.embedding(i, w) * 2,
        torch.randn(11, 6),
        torch.randint(11, (2, 5)),
        fixed=(11, 6),
        fallback="allow",
    )
    ids = torch.tensor([[1, bad], [2, 3]])
    with pytest.raises((GraphRunError, IndexError), match="index"):
        fixed(torch.randn(11, 6), ids)
    assert compiled(torch.randn(11, 6), ids.clamp(0, 10))[0].shape == (2, 2, 6)


def test_writing():
    new = torch.randn(4, 6, 4)
    same(
        lambda a, i, b: (a.index_copy(0, i % 5, b), a.index_add(0, i % 5, b), a.index_fill(0, i % 5, 2.5)),
        x,
        rows,
        new,
    )
    same(lambda a, i, b: a.index_put((i,), b), x, rows, new)
    same(lambda a, i, b: put(a, [None, i], b[0, 0]), x, rows, new)
    same(lambda a, i: a.index_put((i, i), torch.tensor(7.0)), x, rows)
    same(lambda a, i: put(a, [None, i, i.abs() % 4], torch.tensor(7.0)), x, rows)
    same(lambda a, i, b: a.index_put((torch.zeros_like(i),), b, accumulate=True), x, rows, new)
    same(
        lambda a, b: (a.slice_scatter(b[:, :2], 1, 3, 5), a.select_scatter(b[0], 0, -1)),
        x,
        torch.randn(5, 6, 4),
    )


def test_scatter():
    index, new = torch.randint(3, (5, 6, 2)), torch.randn(5, 6, 4)
    same(lambda a, i, b: (a.scatter_add(2, i, b), a.scatter(0, i[:1], 2.5)), x, index, new)
    unique = torch.rand(5, 6, 4).argsort(-1)
    same(lambda a, i, b: a.scatter(2, i, b), x, unique, new)
    for how in ("sum", "prod", "amax", "amin", "mean"):
        same(lambda a, i, b, how=how: a.scatter_reduce(2, i, b, how), x, index, new)
    for how in ("sum", "prod", "mean"):  # of extremes: test_left_to_torch.py
        same(lambda a, i, b, how=how: a.scatter_reduce(2, i, b, how, include_self=False), x, index, new)


ADDING = {
    "scatter_add": lambda a, i, b: a.scatter_add(0, i, b),
    "scatter_reduce": lambda a, i, b: a.scatter_reduce(0, i, b, "sum"),
    "index_add": lambda a, i, b: a.index_add(0, i, b),
    "index_put": lambda a, i, b: a.index_put((i,), b, accumulate=True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ADDING)
def test_sums_of_16_bit_floats_are_rounded_once(name, dtype):
    terms = torch.tensor([-104.0, 0.001, -9984.0, 21.0, 104.0, 9984.0, 30.0]).to(dtype)
    target, index = torch.full((3,), 2.0, dtype=dtype), torch.full((7,), 2)
    run, _ = lowered(ADDING[name], target, index, terms)
    want = ADDING[name](target.double(), index, terms.double()).to(dtype)
    assert torch.equal(run(target, index, terms)[0], want)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("name", ADDING)
def test_sums_of_small_whole_numbers_wrap_around(name, dtype):
    target, index = torch.full((3,), torch.iinfo(dtype).max, dtype=dtype), torch.tensor([2, 0, 2, 2])
    same(
        lambda a, i, b: (ADDING[name](a, i, b) % 7, ADDING[name](a, i, b)),
        target,
        index,
        target[[0, 1, 2, 0]],
    )


def test_bools_and_whole_numbers():
    mask = torch.zeros(5, 6, dtype=torch.bool)
    same(lambda m, i: (m.index_fill(0, i % 5, True), m[i], m.scatter(1, i.view(1, 4) % 6, True)), mask, rows)
    same(lambda a, i: (a[i], a.index_add(0, i % 5, a[:4])), torch.arange(30).view(5, 6) + 2**25, rows)


def test_masks_as_indices_are_refused():
    _, report = lowered(lambda a: a.index_put((a > 0,), torch.tensor(0.0)), x, fallback="allow")
    assert [reason for _, reason in report.refusals()] == ["an index is a mask"]
