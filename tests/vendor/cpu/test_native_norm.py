"""The C++ norms: to the bit what torch's kernels give one by one, as transformers calls them."""

import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import needs_compiler, tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-6


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]

x86_64 = pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="the order of torch's sum is known here for x86-64"
)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.dlinfer_cpu.rms_norm.default(x, weight, EPS)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.dlinfer_cpu.add_rms_norm.default(x, residual, weight, EPS)


def transformers_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The forward of transformers' LlamaRMSNorm, by one thread: torch's two share the sum of a long single row."""
    wide = x.to(torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        variance = wide.pow(2).mean(-1, keepdim=True)
    finally:
        torch.set_num_threads(before)
    return weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


def assert_as_transformers(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    assert torch.equal(rms_norm(x, weight), transformers_norm(x, weight))
    normed, total = add_rms_norm(x, residual, weight)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, transformers_norm(x + residual, weight))


def check_sizes() -> None:
    """Sizes around every boundary of the sum: lanes, columns, runs, and each of the levels."""
    for dtype in DTYPES:
        for hidden in (8, 9, 31, 32, 33, 64, 100, 511, 512, 513, 896, 8191, 8192, 8232, 131072, 131613):
            for rows in (1, 2, 30):
                if rows * hidden > 300_000:
                    continue
                x, residual = (tensor(seed, (rows, hidden), dtype) for seed in (hidden, hidden + 1))
                assert_as_transformers(x, residual, tensor(rows, (hidden,), dtype))


@x86_64
def test_boundaries():
    check_sizes()


@x86_64
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 40),
    hidden=st.integers(8, 1300),
    gap=st.integers(0, 9),
    power=st.integers(-6, 6),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, 512, 896, 0, 0, 0)
@example(torch.bfloat16, 40, 4864, 3, 0, 0)
@settings(max_examples=200, deadline=None)
def test_the_bits_of_transformers(dtype, rows, hidden, gap, power, seed):
    x, residual = (tensor(seed + i, (rows, hidden), dtype, gap) * 2.0**power for i in range(2))
    assert_as_transformers(x, residual, tensor(seed + 2, (hidden,), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 5, 8, 896])
def test_against_float64(dtype, hidden):
    # Three roundings: of the scaled value, of the product, and, in float32, of the scale, which has six behind it.
    x, weight = tensor(0, (50, hidden), dtype), tensor(1, (hidden,), dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    roundings = 4 if dtype is torch.float32 else 1.01
    allowed = roundings * torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).smallest_normal
    assert ((rms_norm(x, weight).double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(tensor(0, (96,), torch.bfloat16), id="a vector"),
        pytest.param(tensor(0, (7, 4, 96), torch.bfloat16, gap=7), id="with gaps"),
        pytest.param(
            tensor(0, (2, 5, 960), torch.bfloat16).unflatten(2, (10, 96))[:, :, 2:6], id="packed heads"
        ),
        pytest.param(tensor(0, (3, 5, 4, 96), torch.bfloat16).transpose(1, 2), id="heads first"),
        pytest.param(tensor(0, (3, 5, 4, 96), torch.bfloat16).permute(2, 1, 0, 3), id="three strides"),
        pytest.param(tensor(0, (96, 5), torch.bfloat16).t(), id="transposed"),
        pytest.param(tensor(0, (6, 192), torch.bfloat16)[::2, ::2], id="every other element"),
        pytest.param(tensor(0, (1, 96), torch.bfloat16).expand(4, 96), id="rows that overlap"),
        pytest.param(tensor(0, (5, 97), torch.bfloat16)[:, 1:], id="off the alignment"),
        pytest.param(tensor(0, (2, 0, 96), torch.bfloat16), id="no rows"),
        pytest.param(tensor(0, (3, 0), torch.bfloat16), id="nothing in a row"),
    ],
)
def test_layouts(x):
    weight = tensor(1, (2 * x.shape[-1],), torch.bfloat16)[::2]
    packed, residual = x.contiguous(), tensor(2, tuple(x.shape), torch.bfloat16)
    normed, total = add_rms_norm(x, residual, weight)
    for ours, theirs in (
        (rms_norm(x, weight), rms_norm(packed, weight.contiguous())),
        (total, packed + residual),
        (normed, rms_norm(packed + residual, weight)),
        (add_rms_norm(residual, x, weight)[0], normed),
    ):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_company_do_not_change_a_bit(dtype):
    x, weight = tensor(0, (333, 900), dtype), tensor(1, (900,), dtype)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(rms_norm(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.equal(rms_norm(x[7:9], weight), outs[0][7:9])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_where_torch_has_them(dtype):
    x, weight = tensor(0, (6, 70), dtype), tensor(1, (70,), dtype)
    x[1, 69], x[2, 3], x[3, 4], x[3, 5] = torch.nan, torch.inf, -torch.inf, torch.nan
    weight[5], weight[6], x[4, 6] = torch.inf, torch.nan, 0.0
    x[5] = torch.finfo(dtype).max
    torch.testing.assert_close(
        rms_norm(x, weight), transformers_norm(x, weight), rtol=0, atol=0, equal_nan=True
    )
    normed, total = add_rms_norm(x, x, weight)
    torch.testing.assert_close(total, x + x, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(normed, transformers_norm(x + x, weight), rtol=0, atol=0, equal_nan=True)


def test_opcheck():
    x, weight = tensor(0, (2, 3, 8), torch.bfloat16), tensor(1, (8,), torch.bfloat16)
    torch.library.opcheck(torch.ops.dlinfer_cpu.rms_norm.default, (x, weight, EPS))
    torch.library.opcheck(torch.ops.dlinfer_cpu.add_rms_norm.default, (x, x, weight, EPS))


half = torch.ones(2, 3, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((half[0, 0], half[0]), "at least one dimension"),
        ((half, half), r"weight is \[hidden = 3\]"),
        ((half, half[0, :2]), r"weight is \[hidden = 3\]"),
        ((half, half[0].float()), "x and weight differ in dtype"),
        ((half.double(), half[0].double()), "no kernel for this dtype"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        rms_norm(*arguments)


@pytest.mark.parametrize("residual", [half[:1], half[None], half.half()], ids=["size", "rank", "dtype"])
def test_a_residual_of_another_kind(residual):
    with pytest.raises(RuntimeError, match="x and residual differ in shape or dtype"):
        add_rms_norm(half, residual, half[0])
