"""Rows copied in C++ to their places, and sums of whole numbers, against torch's own ops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import UNKNOWN, needs_compiler

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


def index_copy_(*args) -> Tensor:
    return torch.ops.dlinfer_cpu.index_copy_.default(*args)


def lying(shape: list[int], order: list[int], gap: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers whose dimensions lie in memory in this order, with a gap behind the last."""
    draw = torch.Generator().manual_seed(seed)
    wide = [shape[d] for d in order]
    wide[-1] += gap
    numbers = torch.randint(-100, 100, wide, generator=draw).to(dtype)[..., : wide[-1] - gap]
    return numbers.permute([order.index(d) for d in range(len(shape))])


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    rows=st.integers(0, 7),
    data=st.data(),
    gaps=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_it_is_torch_s(dtype, shape, rows, data, gaps, strided, seed) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] += 1
    orders = [data.draw(st.permutations(range(len(shape)))) for _ in range(2)]
    places = torch.randint(0, shape[dim], (rows * 2,), generator=torch.Generator().manual_seed(seed))
    places = places[::2] if strided else places[:rows]
    ours, wanted = (lying(shape, orders[0], gaps[0], dtype, seed) for _ in range(2))
    from_shape = list(shape)
    from_shape[dim] = rows
    source = lying(from_shape, orders[1], gaps[1], dtype, seed + 1)
    assert index_copy_(ours, dim, places, source) is ours
    # One after another, since torch says nothing of rows for the same place.
    for row, place in enumerate(places.tolist()):
        wanted.select(dim, place).copy_(source.select(dim, row))
    assert torch.equal(ours, wanted)


def test_a_static_cache() -> None:
    cache, new = torch.zeros(2, 3, 50, 16), torch.randn(2, 20, 3, 16).transpose(1, 2)
    index_copy_(cache, 2, torch.arange(30, 50), new)
    assert torch.equal(cache[:, :, 30:], new) and not cache[:, :, :30].any()


@pytest.mark.parametrize("place", [-1, 3, 2**40])
def test_a_place_outside_is_refused_before_anything_is_written(place) -> None:
    to = torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match=f"index {place} is out of bounds for dimension 0 with size 3"):
        index_copy_(to, 0, torch.tensor([0, place]), torch.ones(2, 2))
    assert not to.any()


@pytest.mark.parametrize(
    ("source", "dim"),
    [(torch.ones(3, 2), 0), (torch.ones(2, 3), 0), (torch.ones(2, 2).double(), 0), (torch.ones(2, 2), 2)],
)
def test_errors_of_shape_are_torch_s(source, dim) -> None:
    to, at = torch.zeros(3, 2), torch.tensor([0, 1])
    for call in (to.index_copy_, lambda *args: index_copy_(to, *args)):
        with pytest.raises((RuntimeError, IndexError), match=rf"index_copy|Dimension out of range|{UNKNOWN}"):
            call(dim, at, source)
    assert not to.any()


def test_overlapping_memory_is_torch_s_to_refuse() -> None:
    memory = torch.arange(12.0).view(6, 2)
    with pytest.raises(RuntimeError, match=f"memory|{UNKNOWN}"):
        index_copy_(memory[:4], 0, torch.tensor([0, 1]), memory[1:3])


# --- sums of whole numbers


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("one", "other"), [((5,), (1,)), ((5,), ()), ((), ()), ((2, 3), (2, 3)), ((0,), (1,)), ((2, 3), (1, 1))]
)
def test_sums_of_whole_numbers(dtype, one, other) -> None:
    limits = torch.iinfo(dtype)
    x = torch.randint(limits.min, limits.max, one, dtype=dtype)
    y = torch.full(other, limits.max, dtype=dtype)
    assert torch.equal(torch.ops.dlinfer_cpu.add_whole(x, y), x + y)  # wrapping around, both
    wanted = x.clone().add_(7)
    assert torch.ops.dlinfer_cpu.add_whole_(x, 7) is x and torch.equal(x, wanted)


def test_whole_numbers_with_gaps() -> None:
    x, y = torch.arange(10)[::2], torch.arange(15)[::3]
    assert torch.equal(torch.ops.dlinfer_cpu.add_whole(x, y), x + y)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(2), torch.zeros(2)),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)),
    ],
)
def test_other_sums_are_refused(x, y) -> None:
    with pytest.raises(RuntimeError, match="add_whole"):
        torch.ops.dlinfer_cpu.add_whole(x, y)
