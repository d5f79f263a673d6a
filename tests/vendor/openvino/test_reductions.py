"""Reductions and orderings: every dimension argument, nothing to reduce, ties, infinities, whole numbers."""

import pytest
import torch

from tests.vendor.openvino.lowering import lowered, same

inf, nan = float("inf"), float("nan")
x = torch.randn(3, 5, 4)
others = ((torch.randn(2, 5, 4),), (torch.randn(7, 5, 4),))

DIMS = [None, 0, -1, (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("keepdim", [False, True])
def test_over_dimensions(dim, keepdim):
    named = {} if dim is None else {"dim": dim, "keepdim": keepdim}

    def reduced(a):
        every = (
            a.sum(**named),
            a.mean(**named),
            torch.amax(a, **(named or {"dim": ()})),
            torch.var(a, **named),
        )
        return *every, torch.std(a, **named), (a > 1).any(**named), (a > -3).all(**named)

    same(reduced, x, others=others)


def test_dtypes():
    whole = torch.randint(-(2**26), 2**26, (5, 4))  # of which no sum can leave 32 bits
    same(
        lambda a: (a.sum(), a.sum(0), a.sum(1, keepdim=True), a.cumsum(0), a.amax(0), a.amin(1), a.max()),
        whole,
    )
    same(lambda a: (a.sum(), a.sum(1), a.float().mean(), a.any(), a.all(0), a.cumsum(1)), whole > 0)
    same(
        lambda a: (a.sum(dtype=torch.int64), a.sum(0), a.amax()),
        torch.arange(250, dtype=torch.uint8).view(5, 50),
    )
    same(lambda a: (a.sum(0), a.mean(1), a.sum(dtype=torch.float32), a.norm(dim=1)), x[0].bfloat16())


def test_counts_beyond_what_float32_holds():
    """Of more trues than 2^24, by one axis, two, and all."""
    flags = torch.ones(2**12 + 1, 2**12 + 3, dtype=torch.bool)
    assert flags.numel() > 2**24
    flags[5, 7] = False
    same(lambda a: (a.sum(), a.sum((0, 1), keepdim=True)), flags, others=[(flags.t().contiguous(),)])
    same(lambda a: (a.view(-1).sum(0), a.sum(1)), flags, fixed=flags.shape)


@pytest.mark.full
def test_places_and_ranges_beyond_what_float32_holds():
    number = 2**24 + 5
    x = torch.zeros(number)
    x[-2] = 1
    same(lambda a: (a.argmax(), a.max(0).indices, torch.arange(a.shape[0])[-3:]), x)
    same(lambda a: (a > 0).cumsum(0)[-3:], x)
    same(lambda a: (a == 0).cumsum(0)[-3:], x)


def test_correction_and_norms():
    same(lambda a: (torch.var(a, 1, correction=0), torch.std(a, (0, 2), correction=2)), x, others=others)
    same(lambda a: (torch.var_mean(a, 1), torch.var(a, 1, unbiased=False)), x, others=others)
    same(lambda a: (torch.linalg.vector_norm(a, dim=-1), torch.linalg.vector_norm(a, 1, dim=0), a.norm()), x)
    same(lambda a: (a.logsumexp(-1), a.logsumexp((0, 1), keepdim=True)), x, others=others)
    same(lambda a: (a.prod(), a.prod(1), a.prod(-1, keepdim=True)), x)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_of_nothing_and_of_one(rows):
    def reduced(a):
        return a.sum(0), a.mean(0), a.sum(1), (a > 0).any(0), (a > 0).all(0), a.long().sum(0), a.sum()

    same(reduced, torch.randn(rows, 3))
    empty = torch.zeros(0, 3)
    compiled, _ = lowered(reduced, torch.randn(4, 3))
    for one, other in zip(compiled(empty), reduced(empty), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("name", ["logsumexp", "var", "std"])
def test_over_nothing(name):
    """OpenVINO 2026.4.1 ends the process where an op before it made the empty tensor."""
    from tests.graph.compiling import compiled

    def summed(a: torch.Tensor) -> torch.Tensor:
        return getattr(a.exp(), name)(0)

    run = compiled(summed, engine="openvino", fallback="allow", small_regions="engine")
    for x in (torch.zeros(0, 3), torch.randn(4, 3)):
        torch.testing.assert_close(run(x), summed(x), equal_nan=True)


def test_a_number():
    same(
        lambda a: (a.sum(), a.mean(), a.amax(), a.argmax(), a.cumsum(0), a.sum(0), a.norm(), a.all()),
        torch.tensor(2.5),
    )


def test_infinities():
    rows = torch.tensor([[-inf, -inf], [inf, 1.0], [torch.finfo(torch.float32).min, -inf]])
    same(lambda a: (a.amax(1), a.amin(1), a.max(), a.max(1), a.argmax(1), a.logsumexp(1)), rows)


TIES = torch.tensor([[3.0, 1.0, 3.0, 3.0, 2.0, 1.0]] * 3)


def test_of_equal_elements_the_first_is_taken():
    same(
        lambda a: (a.argmax(1), a.argmin(1), a.max(1), a.min(1), a.argmax(), a.argmax(1, keepdim=True)), TIES
    )
    same(lambda a: (a.sort(stable=True, dim=1), a.sort(stable=True, dim=1, descending=True)), TIES)
    same(lambda a: (a.argsort(stable=True, dim=1), a.sort(0), a.argsort(1)), TIES)
    same(lambda a: (a.argmax(0), a.max(0), a.argmin()), (TIES > 2).long())


def test_topk():
    wide = torch.randn(3, 50)
    same(
        lambda a: (a.topk(3), a.topk(50), a.topk(2, largest=False), a.topk(1, dim=0)),
        wide,
        others=[(torch.randn(8, 50),)],
    )
    same(lambda a: (a.topk(5, dim=1), a.sort(0)), torch.randperm(2**20)[:20].view(4, 5) + 2**25)
    same(lambda a, n: a.topk(n, dim=1), wide, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_topk_and_sort_of_infinities_beside_nan(dtype):
    """The largest finite number lies between the others and infinity."""
    rows = torch.tensor(
        [[inf, nan, 1.0, -inf], [nan, inf, inf, 2.0], [inf, 3.0, nan, nan], [-inf, 0.0, nan, inf]]
    )
    rows = torch.cat((rows, rows.flip(1), torch.full((1, 4), torch.finfo(dtype).max))).to(dtype)
    same(lambda a: (a.topk(3, 0)[0], a.topk(2)[0], a.topk(2, largest=False)[0], a.sort(0)[0]), rows)
    same(lambda a: a.sort(-1, descending=True)[0], rows)


def test_cumulative_sums():
    same(lambda a: (a.cumsum(0), a.cumsum(-1), a.cumsum(1, dtype=torch.float32)), x, others=others)
    ids = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    same(lambda mask: (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1), ids)  # positions behind left padding


def test_products_of_whole_numbers_are_refused():
    _, report = lowered(lambda a: a.prod(0), torch.randint(5, (3, 4)), fallback="allow")
    ((_, reason),) = report.refusals()
    assert "OpenVINO computes in float32" in reason
