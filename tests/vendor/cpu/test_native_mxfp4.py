"""The C++ product with a weight of 4-bit floats, whose loops are those of whole numbers, against float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.errors import OpArgumentError
from dlinfer.ops.quantised.packing import AWQ, MXFP4
from dlinfer.vendor.cpu.four_bit import linears
from tests.vendor.cpu.test_native import (
    DTYPES,
    FLOAT32_UNIT,
    library,
    needs_compiler,
    resident_bytes,
    tensor,
)

pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]
__all__ = ["library"]


def weight_of(seed: int, in_features: int, words: int) -> tuple[Tensor, Tensor]:
    """Any bits for numbers, and powers of two for scales."""
    generator = torch.Generator().manual_seed(seed)
    qweight = torch.randint(-(2**31), 2**31, (in_features, words), generator=generator).int()
    powers = torch.randint(-9, 3, (MXFP4.groups(in_features), 8 * words), generator=generator)
    return qweight, torch.exp2(powers.double()).bfloat16()


def assert_close(out: Tensor, x: Tensor, qweight: Tensor, scales: Tensor) -> None:
    """Within the bound of float32 sums in any order (Higham, section 4.2), and one rounding to the dtype."""
    weight = MXFP4.dequantise(qweight, scales, None, torch.float64)
    exact, magnitudes = x.double() @ weight, x.double().abs() @ weight.abs()
    kind = torch.finfo(x.dtype)
    allowed = (x.shape[-1] + 4) * FLOAT32_UNIT * magnitudes + kind.eps / 2 * exact.abs()
    allowed += kind.smallest_normal * kind.eps
    if x.dtype is torch.bfloat16:
        allowed += x.shape[-1] * kind.smallest_normal * 16  # taken for zero by the instruction
    assert (out.dtype, out.shape) == (x.dtype, exact.shape)
    assert ((out.double() - exact).abs() <= allowed).all()


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 110),
    words=st.integers(0, 40),
    in_features=st.integers(0, 500),
    gap=st.integers(0, 9),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, 1, 360, 2880, 0, 0)
@example(torch.float32, 12, 16, 64, 0, 0)
@settings(max_examples=100, deadline=None)
def test_against_float64(dtype, rows, words, in_features, gap, seed):
    x, parts = tensor(seed, (rows, in_features), dtype, gap), weight_of(seed, in_features, words)
    assert_close(linears.mxfp4_matmul(x, *parts), x, *parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 12, 13])
def test_each_number_by_each_scale(dtype, rows):
    """One input at a time, so that nothing is summed: all sixteen numbers in all places of a word, by all of E8M0."""
    numbers = torch.arange(16)[:, None].expand(16, 256)
    powers = torch.exp2(torch.arange(256).double() - 127).bfloat16()
    powers[255] = torch.nan
    qweight, x = MXFP4.pack(numbers), torch.eye(16, dtype=dtype).repeat(2, 1)
    weight = MXFP4.dequantise(qweight, powers[None], None, torch.float64).repeat(2, 1).to(dtype)
    for first in range(0, 32, rows):
        some = slice(first, first + rows)
        out = linears.mxfp4_matmul(x[some], qweight, powers[None])
        assert torch.equal(out.isnan(), weight[some].isnan())
        assert torch.equal(out.nan_to_num(), weight[some].nan_to_num())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_without_the_library_columns_are_widened_some_at_a_time(dtype, monkeypatch):
    monkeypatch.setattr(linears, "compiled", lambda *given: None)
    x, parts = tensor(0, (5, 96), dtype), weight_of(1, 96, 130)
    assert_close(linears.mxfp4_matmul(x, *parts), x, *parts)


def test_no_float_copy_of_the_weight_is_made():
    parts, x = weight_of(0, 4096, 2048), tensor(0, (16, 4096), torch.bfloat16)
    linears.mxfp4_matmul(x, *parts)
    before = resident_bytes()
    kept = linears.mxfp4_matmul(x, *parts)  # of 32 MiB of words
    assert resident_bytes() - before < 8 << 20
    assert kept.isfinite().all()


def test_opcheck():
    for rows in (1, 9):
        args = (tensor(0, (rows, 40), torch.bfloat16), *weight_of(1, 40, 3), 32)
        torch.library.opcheck(torch.ops.dlinfer_cpu.mxfp4_matmul.default, args)


def test_whole_numbers_of_the_same_words_are_others():
    x, (qweight, scales) = tensor(0, (3, 64), torch.float32), weight_of(0, 64, 4)
    whole = linears.weight_quant_matmul(x, qweight, scales, None, None, 32)
    torch.testing.assert_close(whole, x @ AWQ.of_groups(32).dequantise(qweight, scales, None, torch.float32))
    assert not torch.allclose(whole, linears.mxfp4_matmul(x, qweight, scales))


def test_nothing_is_rounded_to_floats_of_4_bits_here():
    with pytest.raises(OpArgumentError, match="numbers"):
        MXFP4.quantise(torch.ones(32, 8))
