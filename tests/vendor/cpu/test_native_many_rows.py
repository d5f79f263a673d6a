"""dlinfer_cpu::linear with more rows of x than meet a block of the weight at once, whoever computes them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import (
    DTYPES,
    assert_close,
    linear,
    linears,
    needs_compiler,
    tensor,
)

pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]
ROWS = 300
"""More than a panel of 256."""


@pytest.fixture(scope="module")
def library() -> None:
    assert native.why_not() is None


def needs_own(dtype: torch.dtype) -> None:
    """Skip where torch's product takes so many rows on this processor: its sums have an order of their own."""
    if not torch.ops.dlinfer_cpu.linear_takes.default(dtype, ROWS):
        pytest.skip(f"{dtype} with {ROWS} rows is torch's, on this processor")


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(65, 600),
    out_features=st.integers(0, 70),
    in_features=st.integers(0, 1300),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_against_float64(dtype, rows, out_features, in_features, gaps, with_bias, seed):
    x = tensor(seed, (rows, in_features), dtype, gaps[0])
    weight = tensor(seed + 1, (out_features, in_features), dtype, gaps[1])
    bias = tensor(seed + 2, (out_features,), dtype) if with_bias else None
    assert_close(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_boundaries_of_panels(dtype):
    for rows in (66, 97, 128, 129, 255, 256, 257, 512, 513):
        for out_features, in_features in ((1, 1), (17, 33), (40, 1024), (9, 1025), (5, 2500), (700, 520)):
            x, weight = (
                tensor(rows, (rows, in_features), dtype),
                tensor(1, (out_features, in_features), dtype),
            )
            bias = tensor(2, (out_features,), dtype) if rows % 2 else None
            assert_close(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("columns", [100, 1024, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gives_the_same_bits_in_any_company(dtype, columns):
    needs_own(dtype)
    x, weight = tensor(0, (ROWS, columns), dtype), tensor(1, (50, columns), dtype)
    most = torch.ops.dlinfer_cpu.linear_max_inputs.default(dtype)
    parts = ((0, 1), (5, 8), (2, 19), (0, 100), (7, 280), (255, 300))
    if most >= ROWS:
        check_company(x, weight, parts)
    else:  # two kernels, each with an order of its own
        check_company(x[:most], weight, [(first, last) for first, last in parts if last <= most])
        check_company(x, weight, [(first, last) for first, last in parts if last - first > most])


def check_company(x, weight, parts) -> None:
    together = linear(x, weight)
    for first, last in parts:
        assert torch.equal(linear(x[first:last], weight), together[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_weights(dtype):
    x = tensor(0, (200, 600), dtype, gap=3)
    weights = [tensor(seed, (size, 600), dtype, seed) for seed, size in enumerate((300, 1, 0, 130))]
    biases = [tensor(7, (300,), dtype), None, None, tensor(8, (130,), dtype)]
    for out, weight, bias in zip(linears(x, weights, biases), weights, biases, strict=True):
        assert_close(out, x, weight, bias)
        assert out.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row_and_feature(dtype):
    """Blocks are filled up with zeros, beside which infinity would be NaN."""
    x, weight = tensor(0, (101, 530), dtype), tensor(1, (67, 530), dtype)
    x[100, 529], weight[66, 3] = torch.inf, torch.nan
    if not torch.ops.dlinfer_cpu.linear_takes.default(dtype, 101):
        torchs = F.linear(x, weight)
        if (
            torchs[100, :66].isnan().any()
        ):  # oneDNN's bfloat16 without AVX512-BF16, which ONEDNN_MAX_CPU_ISA gives
            pytest.skip(
                f"{dtype} with 101 rows is torch's here, and torch's own product gives NaN for infinity"
            )
    out = linear(x, weight)
    assert out[:, 66].isnan().all()
    assert out[100, :66].isinf().all()
    assert out[:100, :66].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_bit(dtype):
    """Also where there are more of them than blocks of the weight, so that x is cut for them."""
    needs_own(dtype)
    x, weight = tensor(0, (ROWS, 200), dtype), tensor(1, (20, 200), dtype)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs.append(linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
