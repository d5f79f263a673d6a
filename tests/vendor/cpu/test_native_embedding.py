"""Rows of a table in C++: what aten.embedding gives, bit for bit, wherever rows and places lie."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import needs_compiler, tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


def embedding(table: Tensor, places: Tensor) -> Tensor:
    return torch.ops.dlinfer_cpu.embedding.default(table, places)


def assert_torchs(table: Tensor, places: Tensor) -> None:
    got = embedding(table, places)
    assert got.is_contiguous() and got.dtype is table.dtype
    assert torch.equal(got, F.embedding(places, table))


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 60),
    size=st.integers(0, 300),
    gap=st.integers(0, 5),
    count=st.integers(0, 400),
    wide=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, 32, 1024, 0, 1, True, 0)
@example(torch.float32, 7, 1, 0, 100_000, False, 1)
@settings(max_examples=100, deadline=None)
def test_it_is_torchs(dtype, rows, size, gap, count, wide, seed) -> None:
    places = torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(seed))
    assert_torchs(tensor(seed, (rows, size), dtype, gap), places if wide else places.int())


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_rank_and_layout(dtype: torch.dtype) -> None:
    table, places = tensor(0, (9, 50), dtype, 0), torch.arange(24).view(2, 3, 4) % 9
    assert_torchs(table, places)
    assert_torchs(table, places.transpose(0, 2))
    assert_torchs(table, torch.tensor(8))
    assert_torchs(table[1].expand(9, 50), places)
    assert_torchs(table.t(), places)
    assert_torchs(table[:, ::2], places[..., ::3].int())


def test_numbers_keep_their_bits() -> None:
    table = torch.tensor([[float("nan"), -0.0], [float("inf"), 2.0**-140]])
    got = embedding(table, torch.tensor([1, 0, 0]))
    assert torch.equal(got.view(torch.int32), table.view(torch.int32)[[1, 0, 0]])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads: int) -> None:
    table, places = tensor(3, (1000, 512), torch.bfloat16), torch.arange(5000) * 7 % 1000
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_torchs(table, places)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("place", [-1, 5, 2**40])
def test_a_place_outside_is_refused(place: int) -> None:
    places = torch.zeros(3000, dtype=torch.int64)
    places[2500] = place
    with pytest.raises(RuntimeError, match=f"index out of range in self: {place} of 5 rows"):
        embedding(torch.ones(5, 64), places)


def test_what_does_not_fit_is_refused() -> None:
    for table, places in (
        (torch.ones(5), torch.tensor([0])),
        (torch.ones(5, 2, 3), torch.tensor([0])),
        (torch.ones(5, 2), torch.tensor([0.0])),
        (torch.ones(5, 2), torch.tensor([True])),
    ):
        with pytest.raises(RuntimeError, match="embedding: a table of two dimensions"):
            embedding(table, places)


def test_opcheck() -> None:
    table, places = torch.randn(7, 16).bfloat16(), torch.tensor([[3, 0], [6, 6]])
    torch.library.opcheck(torch.ops.dlinfer_cpu.embedding.default, (table, places))
