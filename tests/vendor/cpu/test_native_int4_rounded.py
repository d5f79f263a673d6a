"""The C++ linear layer with a weight of 4 bits that rounds its inputs to 8, against float64 of the rounded ones."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as runs
from hypothesis import strategies as st
from torch import Tensor

from dlinfer import settings
from dlinfer.ops.quantised.packing import AWQ
from dlinfer.vendor.cpu.four_bit import linears
from tests.vendor.cpu.test_native import DTYPES, FLOAT32_UNIT, library, needs_compiler
from tests.vendor.cpu.test_native_int4 import Parts, assert_close, product, weight_of

pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]
__all__ = ["library"]

STRIP = 128


def rounded_product(x: Tensor, parts: Parts, bias: Tensor | None = None, group_size: int = 0) -> Tensor:
    qweight, scales, offset = parts
    kernel = torch.ops.dlinfer_cpu.weight_quant_matmul_int8.default
    return kernel(x, qweight, scales, offset, bias, group_size)


def is_rounding(library, group_size: int, in_features: int) -> bool:
    """Whether this build has the instruction, and the groups the size."""
    x = torch.full((1, 4), 1.0)
    x[:, 1] = 0.001  # which rounding makes 0
    qweight = torch.zeros(4, 1, dtype=torch.int32)
    qweight[1] = 0x99999999 - (1 << 32)
    one = (qweight, torch.ones(1, 8), torch.full((1, 1), 0, dtype=torch.int32))
    return bool(rounded_product(x, one, None, 4)[0, 0] == 0) and (
        group_size % 4 == 0 or group_size >= in_features
    )


def as_rounded(x: Tensor, group_size: int) -> Tensor:
    """x in float64 as the kernel multiplies it: whole multiples of a scale for each row and strip of a group."""
    wide = x.float()
    out = torch.empty_like(x, dtype=torch.float64)
    size = group_size or x.shape[-1]
    for group in range(0, x.shape[-1], size):
        end = min(group + size, x.shape[-1])
        for begin in range(group, end, STRIP):
            part = wide[..., begin : min(begin + STRIP, end)]
            largest = part.abs().amax(-1, keepdim=True)
            most = torch.full_like(largest, 127)  # a number / a tensor is two roundings in torch
            by = torch.where(largest < 1e-35, 0.0, most / largest)
            whole = (part * by).round()
            scale = torch.where(largest < 1e-35, 0.0, largest / 127)
            out[..., begin : min(begin + STRIP, end)] = whole.double() * scale.double()
    return out


def assert_is_of_rounded(out: Tensor, x: Tensor, parts: Parts, bias: Tensor | None, group_size: int) -> None:
    """Within float32 sums of a strip's parts each, and one rounding to the dtype."""
    qweight, scales, offset = parts
    weight = AWQ.of_groups(group_size).dequantise(qweight, scales, offset, torch.float64)
    inputs = as_rounded(x, group_size)
    exact, magnitudes = inputs @ weight, inputs.abs() @ weight.abs()
    if bias is not None:
        exact, magnitudes = exact + bias.double(), magnitudes + bias.double().abs()
    kind = torch.finfo(x.dtype)
    allowed = (x.shape[-1] / STRIP + 8) * FLOAT32_UNIT * magnitudes + kind.eps / 2 * exact.abs()
    allowed += kind.smallest_normal * kind.eps
    excess = (out.double() - exact).abs() - allowed
    assert excess.numel() == 0 or excess.max() <= 0, f"beyond the bound by {excess.max():.2e}"


@given(
    seed=st.integers(0, 2**16),
    rows=st.sampled_from([1, 2, 3, 4, 6, 7, 12, 13, 24, 25, 36, 47, 256, 300]),
    groups=st.sampled_from(
        [(64, 32), (128, 128), (300, 128), (384, 0), (130, 64), (260, 256), (4, 4), (7, 0)]
    ),
    words=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    zeros=st.booleans(),
    bias=st.booleans(),
)
@example(seed=0, rows=1, groups=(130, 64), words=17, dtype=torch.float16, zeros=True, bias=True)
@example(seed=0, rows=33, groups=(128, 128), words=16, dtype=torch.bfloat16, zeros=True, bias=False)
@runs(max_examples=60, deadline=None)
def test_is_the_product_of_rounded_inputs(library, seed, rows, groups, words, dtype, zeros, bias):
    in_features, group_size = groups
    if not is_rounding(library, group_size, in_features):
        pytest.skip("this build has no VNNI: see test_without_the_instruction_nothing_is_rounded")
    parts = weight_of(seed, in_features, words, group_size, zeros=zeros)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    x[:, : in_features // 3] *= 100  # strips differ
    x[1:2] = 0
    offset = torch.randn(words * 8, generator=generator).to(dtype) if bias else None
    out = rounded_product(x, parts, offset, group_size)
    assert out.dtype == dtype and out.shape == (rows, words * 8)
    assert_is_of_rounded(out, x, parts, offset, group_size)


@pytest.mark.parametrize("rows", [1, 64])
def test_odd_groups_are_not_rounded(rows):
    group_size = 6
    parts = weight_of(1, 128, 9, group_size)
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = rounded_product(x, parts, None, group_size)
    assert torch.equal(out, product(x, parts, None, group_size))


def test_without_the_instruction_nothing_is_rounded(library):
    """On other CPUs, and under DLINFER_CPU_ISA=avx2; with it, this says that it is used."""
    parts = weight_of(2, 128, 9, 128)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = rounded_product(x, parts, None, 128)
    same = torch.equal(out, product(x, parts, None, 128))
    assert same != is_rounding(library, 128, 128)
    if same:
        assert_close(out, x, parts, None, 128)


def test_a_row_is_the_same_in_any_company():
    parts = weight_of(3, 512, 24, 128)
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    whole = rounded_product(x, parts, None, 128)
    for first, last in ((0, 1), (5, 8), (0, 6), (3, 15), (40, 53), (0, 24), (0, 40), (17, 150), (256, 300)):
        assert torch.equal(rounded_product(x[first:last], parts, None, 128), whole[first:last])


def test_rows_that_are_not_finite_stay_alone():
    parts = weight_of(4, 256, 8, 128)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    clean = rounded_product(x, parts, None, 128)
    x[3, 200], x[5, 0] = float("nan"), float("inf")
    out = rounded_product(x, parts, None, 128)
    assert out[3].isnan().all() and not out[5].isfinite().any()
    others = [row for row in range(40) if row not in (3, 5)]
    assert torch.equal(out[others], clean[others])


def test_strided_rows_and_more_dimensions():
    parts = weight_of(5, 128, 8, 64)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    view = x[:, :128]
    assert torch.equal(
        rounded_product(view, parts, None, 64), rounded_product(view.contiguous(), parts, None, 64)
    )
    batched = rounded_product(view.unflatten(0, (4, 10)), parts, None, 64)
    assert torch.equal(batched.flatten(0, 1), rounded_product(view, parts, None, 64))


def test_the_setting_chooses(monkeypatch):
    assert linears.native_matmul() == "weight_quant_matmul"
    with settings.override(cpu_activations="int8"):
        assert linears.native_matmul() == "weight_quant_matmul_int8"
