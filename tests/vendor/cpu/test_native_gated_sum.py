"""The sum with a gate in C++: in 16 bits what torch's three kernels give one after the other, else within rounding."""

import pytest
import torch
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


def gated_sum(x: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    return torch.ops.dlinfer_cpu.gated_sum.default(x, gate, y)


def assert_right(x: Tensor, gate: Tensor, y: Tensor) -> None:
    """float32: three roundings of 2**-24, and a sigmoid within some units in the last place."""
    got = gated_sum(x, gate, y)
    assert got.is_contiguous() and got.dtype is x.dtype
    if x.dtype is torch.float32:
        want = x.double() + gate.double().sigmoid() * y.double()
        torch.testing.assert_close(
            got.double(), want, rtol=1e-6, atol=1e-6 * float(y.abs().max() if y.numel() else 0)
        )
    else:
        assert torch.equal(got, x + gate.sigmoid() * y)


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 40),
    size=st.integers(1, 300),
    gap=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, 1, 1024, 0, 0)
@example(torch.float32, 300, 512, 0, 1)
@settings(max_examples=100, deadline=None)
def test_it_is_torchs(dtype, rows, size, gap, seed) -> None:
    x, y = (tensor(seed + i, (rows, size), dtype, gap) for i in (0, 1))
    assert_right(x, tensor(seed + 2, (rows, 1), dtype, gap), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_rank_and_layout(dtype: torch.dtype) -> None:
    x, y, gate = (
        tensor(i, shape, dtype, 0) for i, shape in enumerate([(2, 3, 4, 50), (2, 3, 4, 50), (2, 3, 4, 1)])
    )
    assert_right(x, gate, y)
    assert_right(x[0, 0, 0], gate[0, 0, 0], y[0, 0, 0])
    assert_right(x.transpose(0, 2), gate.transpose(0, 2), y.transpose(0, 2))
    assert_right(x[..., ::2], gate, y[..., 1::2])
    assert_right(x[:, :1].expand(2, 3, 4, 50), gate[:1].expand(2, 3, 4, 1), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none(dtype: torch.dtype) -> None:
    x, y = torch.ones(5, 40).to(dtype), torch.ones(5, 40).to(dtype)
    gate = torch.tensor([[torch.nan], [torch.inf], [-torch.inf], [0.0], [1.0]]).to(dtype)
    y[4, 3], x[3, 39] = torch.inf, torch.nan
    got, want = gated_sum(x, gate, y), x + gate.sigmoid() * y
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_with_any_number_of_threads(dtype: torch.dtype) -> None:
    x, y, gate = (tensor(i, shape, dtype, 0) for i, shape in enumerate([(400, 203), (400, 203), (400, 1)]))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(gated_sum(x, gate, y))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, results[0]) for one in results)
    assert torch.equal(gated_sum(x[7], gate[7], y[7]), results[0][7])


def test_what_does_not_fit_is_refused() -> None:
    x, gate = torch.ones(3, 4), torch.ones(3, 1)
    for given_ in (
        (x, gate, x[:2]),
        (x, gate[:2], x),
        (x, x, x),
        (x, gate.bfloat16(), x),
        (x, gate[:, 0], x),
    ):
        with pytest.raises(RuntimeError, match="gated_sum: x and y"):
            gated_sum(*given_)
    with pytest.raises(RuntimeError, match="no kernel for this dtype"):
        gated_sum(x.double(), gate.double(), x.double())


def test_opcheck() -> None:
    x, gate = torch.randn(3, 5, 16).bfloat16(), torch.randn(3, 5, 1).bfloat16()
    torch.library.opcheck(torch.ops.dlinfer_cpu.gated_sum.default, (x, gate, x))
