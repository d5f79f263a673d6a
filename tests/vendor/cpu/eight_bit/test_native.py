"""The kernels in C++ of 8-bit numbers: to the bit where they round, exact where they add whole numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.ops import rms_norm_w8a8 as norm
from dlinfer.ops.quantised import eight_bit
from dlinfer.vendor.cpu import native

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="no C++ compiler here")
sizes = st.integers(1, 200)


def kernel(name: str, *args: object):
    return getattr(torch.ops.dlinfer_cpu, name)(*args)


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.uint8)


# --- numbers


def every_number() -> Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8)


def test_every_float8_is_widened_as_torch_does():
    numbers = every_number().view(8, 32)
    wide = kernel("widen_fp8", numbers, torch.ones(8, 1), 1, 32)
    torch.testing.assert_close(wide, numbers.float(), rtol=0, atol=0, equal_nan=True)
    ragged = every_number()[:-1].view(5, 51)  # rows that registers do not divide
    wide = kernel("widen_fp8", ragged, torch.full((5, 1), 0.5), 1, 51)
    torch.testing.assert_close(wide, ragged.float() / 2, rtol=0, atol=0, equal_nan=True)


def test_values_between_two_float8_are_rounded_as_torch_does():
    """All midpoints, and their neighbours in float32. The first value sets a scale of 1."""
    positive = every_number()[:127].float()
    middle = (positive[1:] + positive[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(to)) for to in (0.0, 1e9)]
    values = torch.cat([middle, *near, positive])
    values = torch.cat([torch.tensor([448.0]), values, -values])[None]
    numbers, scale = kernel("dynamic_quant", values, FP8)
    assert scale.item() == 1
    assert torch.equal(bits(numbers), bits(values.to(FP8)))


def test_halves_go_away_from_zero_in_int8():
    whole = np.arange(-127, 127, dtype=np.float32)
    below = np.nextafter(whole + np.float32(0.5), np.float32(-1000))
    values = np.concatenate([whole + np.float32(0.5), below, whole, np.array([127], np.float32)])
    away = np.sign(values) * np.floor(np.abs(values.astype(np.float64)) + 0.5)  # exact in float64
    numbers, scale = kernel("dynamic_quant", torch.from_numpy(values)[None], torch.int8)
    assert scale.item() == 1
    assert numbers[0].tolist() == away.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_dtype", [torch.int8, FP8])
def test_rows_are_quantised_to_the_bit(dtype, quant_dtype):
    torch.manual_seed(0)
    x = (torch.randn(64, 3, 101) * torch.logspace(-9, 4, 64)[:, None, None]).to(dtype)
    x[5] = 0
    numbers, scale = kernel("dynamic_quant", x, quant_dtype)
    want, want_scale = eight_bit.per_token(x, quant_dtype)
    assert torch.equal(scale, want_scale)
    assert torch.equal(bits(numbers), bits(want))


@pytest.mark.parametrize("quant_dtype", [torch.int8, FP8])
def test_a_nan_is_not_lost(quant_dtype):
    x = torch.randn(3, 40)
    x[1, 7] = torch.nan
    _, scale = kernel("dynamic_quant", x, quant_dtype)
    assert scale.isnan().flatten().tolist() == [False, True, False]
    x[1, 7] = torch.inf
    assert kernel("dynamic_quant", x, quant_dtype)[1].isinf().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 16, 128, 500])
def test_rows_are_rounded_in_blocks_to_the_bit(block, dtype, power_of_two):
    torch.manual_seed(0)
    x = (torch.randn(33, 300) * torch.logspace(-9, 4, 33)[:, None]).to(dtype)
    x[4] = 0
    x[5] = 448  # a scale of 1, a power of two already
    got = kernel("rounded_in_blocks", x, block, power_of_two)
    assert torch.equal(got, eight_bit.rounded_in_blocks(x, block, power_of_two))


@pytest.mark.parametrize("quant_dtype", [torch.int8, FP8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_quantised_where_its_result_is_rounded(dtype, quant_dtype):
    """The norm's sum may be taken in another order, so a number in a thousand may be a neighbour."""
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((40, 300), (40, 300), (300,)))
    x[3], residual[3] = 0, 0
    numbers, scale, total = kernel("add_rms_norm_w8a8", x, residual, weight, 1e-6, quant_dtype)
    assert torch.equal(total, x + residual)
    wide = total.double()
    normed = (weight.double() * (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt())).to(dtype)
    want, want_scale = eight_bit.per_token(normed, quant_dtype, least=0.0)
    torch.testing.assert_close(scale, want_scale, rtol=8e-3 if dtype is torch.bfloat16 else 1e-3, atol=0)
    assert (bits(numbers) != bits(want)).float().mean() < (1e-3 if dtype is torch.float32 else 2e-2)
    assert scale[3] == 0
    assert not numbers[3].float().any()
    alone = kernel("rms_norm_w8a8", total, weight, 1e-6, quant_dtype)
    assert torch.equal(bits(alone[0]), bits(numbers))


def test_a_scale_with_few_digits_wraps_no_number():
    """The largest value of a row is up to 190 times a scale that is subnormal."""
    least = 2.0**-149
    x = torch.arange(1, 400)[:, None] * torch.tensor([[1.0, -1.0, 0.5, -0.75]]).double()
    x = (x * least).float()
    weight = torch.full((64,), 3e-43)
    given = torch.randn(50, 64)
    for one, by in ((given, weight), (given, torch.full((64,), 1e-43)), (x, torch.ones(4))):
        numbers, scale = kernel("rms_norm_w8a8", one, by, 1e-6, torch.int8)
        want, want_scale = norm.reference(one, by, 1e-6, torch.int8)
        assert torch.equal(scale.sign(), want_scale.sign())
        assert (numbers.int() - want.int()).abs().max() <= 1 + 127 * (
            (scale - want_scale).abs() / scale
        ).max()
        assert torch.equal(numbers.sign(), want.sign())


# --- products


def linear_int8(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32."""
    ones = torch.ones(len(x), 1), torch.ones(len(weight))
    return kernel("linear_w8a8", x, weight, *ones, torch.float32, torch.int8, None)


@settings(max_examples=60, deadline=None)
@given(inputs=st.integers(0, 80), rows=st.integers(0, 90), columns=sizes, seed=st.integers(0, 9))
def test_int8_is_summed_exactly(inputs, rows, columns, seed):
    torch.manual_seed(seed)
    x = torch.randint(-128, 128, (inputs, columns), dtype=torch.int8)
    weight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    got = linear_int8(x, weight)
    assert torch.equal(got, (x.long() @ weight.long().t()).float())


def test_the_longest_sum_of_the_lowest_numbers():
    x = torch.full((1, 131071), -128, dtype=torch.int8)
    got = linear_int8(x, x)
    assert got.item() == float(np.float32(131071 * 2**14))


@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(0, 80),
    rows=st.integers(0, 90),
    columns=sizes,
    biased=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_int8_sums_are_scaled_and_rounded_as_the_reference_does(inputs, rows, columns, biased, dtype, seed):
    torch.manual_seed(seed)
    x = torch.randint(-128, 128, (inputs, columns), dtype=torch.int8)
    weight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    by, row_scale = torch.rand(inputs, 1), torch.rand(rows, 1)
    bias = torch.randn(rows).to(dtype) * 100 if biased else None
    got = kernel("linear_w8a8", x, weight, by, row_scale, dtype, torch.int8, bias)
    want = ((x.long() @ weight.long().t()).float() * by * row_scale.t()).to(dtype)
    assert torch.equal(got, want if bias is None else want + bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [1, 20, 40])
def test_a_nan_scale_is_in_its_row_alone(dtype, inputs):
    """Whatever stands in the NaN's lower bits, which rounding must not carry over."""
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    x, weight = torch.ones(inputs, 30, dtype=torch.int8), torch.ones(50, 30, dtype=torch.int8)
    by, row_scale = torch.ones(inputs, 1), torch.ones(50)
    by[-1], row_scale[37] = nan, nan
    for bias in (None, torch.ones(50, dtype=dtype)):
        got = kernel("linear_w8a8", x, weight, by, row_scale, dtype, torch.int8, bias)
        want = torch.zeros(inputs, 50, dtype=torch.bool)
        want[-1], want[:, 37] = True, True
        assert torch.equal(got.isnan(), want)


@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(0, 9),
    rows=st.integers(0, 40),
    columns=sizes,
    block=st.tuples(st.sampled_from([1, 3, 16]), st.sampled_from([1, 7, 16, 64, 200])),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_float8_is_summed_in_float32(inputs, rows, columns, block, dtype, seed):
    torch.manual_seed(seed)
    weight = (torch.randn(rows, columns) * 100).clamp(-448, 448).to(FP8)
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1])) / 100
    x, bias = torch.randn(inputs, columns), torch.randn(rows).to(dtype)
    wide = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns].double()
    wide *= weight.double()
    got = kernel("linear_fp8", x, weight, scale, *block, dtype, bias)
    want = (x.double() @ wide.t()).to(dtype).double() + bias.double()
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kernel("widen_fp8", weight, scale, *block), wide.float(), rtol=2e-7, atol=0)


def test_a_nan_in_a_weight_is_in_its_row_alone():
    weight = torch.ones(6, 40).to(FP8)
    weight[2, 39] = torch.nan
    got = kernel("linear_fp8", torch.ones(3, 40), weight, torch.ones(6, 1), 1, 40, torch.float32, None)
    assert got.isnan().any(0).tolist() == [False, False, True, False, False, False]


def test_a_row_gets_the_same_bits_whatever_stands_beside_it():
    torch.manual_seed(0)
    weight, scale = torch.randn(33, 200).to(FP8), torch.rand(33, 1)
    x = torch.randn(9, 200)
    together = kernel("linear_fp8", x, weight, scale, 1, 200, torch.float32, None)
    for row in range(9):
        alone = kernel("linear_fp8", x[row : row + 1], weight, scale, 1, 200, torch.float32, None)
        assert torch.equal(alone[0], together[row])


# --- what is refused

_x, _norm = torch.ones(2, 64), torch.ones(64)
_weight, _scale = torch.ones(8, 64).to(FP8), torch.ones(1, 4)
_int8, _one = torch.ones(8, 64, dtype=torch.int8), torch.ones(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("dynamic_quant", torch.ones(2, 0), torch.int8), "last dimension is at least 1"),
        (("dynamic_quant", torch.ones(()), torch.int8), "last dimension is at least 1"),
        (("dynamic_quant", _x, torch.int16), "int8 or float8_e4m3fn"),
        (("dynamic_quant", _x.double(), torch.int8), "no kernel for this dtype"),
        (("rounded_in_blocks", torch.ones(2, 0), 16, False), "last dimension is at least 1"),
        (("rounded_in_blocks", _x, 0, False), "blocks of 0"),
        (
            ("rms_norm_w8a8", torch.ones(2, 0), torch.ones(0), 1e-6, torch.int8),
            "last dimension is at least 1",
        ),
        (("rms_norm_w8a8", _x, torch.ones(1), 1e-6, torch.int8), r"weight is \[hidden = 64\]"),
        (("rms_norm_w8a8", _x, torch.ones(1, 64), 1e-6, torch.int8), r"weight is \[hidden = 64\]"),
        (("rms_norm_w8a8", _x, _norm.double(), 1e-6, torch.int8), "x's dtype"),
        (("rms_norm_w8a8", _x, _norm, 1e-6, torch.int16), "int8 or float8_e4m3fn"),
        (("add_rms_norm_w8a8", _x, _x[:1], _norm, 1e-6, torch.int8), "shape, dtype and device of x"),
        (("add_rms_norm_w8a8", _x, _x.half(), _norm, 1e-6, torch.int8), "shape, dtype and device of x"),
        (("add_rms_norm_w8a8", _x, _x, _norm[:9], 1e-6, torch.int8), r"weight is \[hidden = 64\]"),
        (("linear_fp8", _x.double(), _weight, _scale, 16, 16, torch.float32, None), "x is a float32"),
        (("linear_fp8", _x[:, :9], _weight, _scale, 16, 16, torch.float32, None), "in_features = 64"),
        (("linear_fp8", _x[None], _weight, _scale, 16, 16, torch.float32, None), "x is a float32"),
        (("linear_fp8", _x, _int8, _scale, 16, 16, torch.float32, None), "float8_e4m3fn"),
        (("linear_fp8", _x, _weight, _scale.double(), 16, 16, torch.float32, None), "scale is a float32"),
        (("linear_fp8", _x, _weight, _scale[:, :3], 16, 16, torch.float32, None), r"tensor \[1, 4\]"),
        (("linear_fp8", _x, _weight, _scale, 4, 16, torch.float32, None), r"tensor \[2, 4\]"),
        (("linear_fp8", _x, _weight, _scale, 16, 0, torch.float32, None), "blocks of 16 rows and 0"),
        (("linear_fp8", _x, _weight, _scale, 16, 16, torch.float32, _one[:7]), r"out_features = 8\]"),
        (("linear_fp8", _x, _weight, _scale, 16, 16, torch.float32, _one.half()), "result's dtype"),
        (("linear_fp8", _x, _weight, _scale, 16, 16, torch.float64, None), "no kernel for this dtype"),
        (("widen_fp8", _int8, _scale, 16, 16), "float8_e4m3fn"),
        (("widen_fp8", _weight, _scale.bfloat16(), 16, 16), "scale is a float32"),
        (("widen_fp8", _weight, _scale, 16, 8), r"tensor \[1, 8\]"),
    ],
)
def test_wrong_arguments(call, message):
    """Nothing is read beyond a tensor, or as if it were of another dtype."""
    with pytest.raises(RuntimeError, match=message):
        kernel(*call)
