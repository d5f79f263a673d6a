"""float32 beside 16 bits keeps its digits. On a CPU without bfloat16 OpenVINO computes all of it in float32 anyway."""

import pytest
import torch
import torch.nn.functional as F

from dlinfer.vendor.openvino.devices import has_bfloat16
from tests.vendor.openvino.lowering import lowered, same

SHORT = (torch.bfloat16, torch.float16)


def rotated(x, places, frequencies):
    """Angles of thousands, of which bfloat16 has the hundreds."""
    angles = places[:, None].float() * frequencies
    return x * angles.cos().to(x.dtype) + x.roll(1, -1) * angles.sin().to(x.dtype)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("start", [0, 5000, 131072])
def test_rotary_positions(dtype, start):
    frequencies = 1e6 ** (-torch.arange(16) / 16)
    same(rotated, torch.randn(6, 16, dtype=dtype), torch.arange(start, start + 6), frequencies)


BESIDE = {
    "product of a transposed one": lambda y, w: y @ y.mT,
    "linear with a bias": lambda y, w: F.linear(y, w, w[0]),
    "product of what is computed": lambda y, w: F.gelu(y) @ w,
    "norm": lambda y, w: F.layer_norm(y, (16,)) @ w,
    "root of mean squares": lambda y, w: (y * torch.rsqrt(y.square().mean(-1, True) + 1e-6)) @ w,
    "softmax": lambda y, w: (y @ w).softmax(-1) * 3,
    "order": lambda y, w: torch.topk(y * 1.0001, 3),
    "comparison": lambda y, w: (y * 1.0001 > w[0]) & (y < w[1]),
    "whole numbers": lambda y, w: (y * 1000).round().to(torch.int32),
    "sums": lambda y, w: (y * 1.0001).cumsum(0) - y.sum(0),
    "attention": lambda y, w: F.scaled_dot_product_attention(y[None], w[None], w[None]),
}


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("fixed", [(16,), (7, 16)])
def test_beside_sixteen_bits(name, dtype, fixed):
    function = BESIDE[name]
    eighths = torch.randint(-8, 9, (7, 16)).to(dtype) / 8  # sums of their products are exact in any order
    same(
        lambda x, y, w: (F.linear(x, x), function(y, w)),
        eighths,
        torch.randn(7, 16),
        torch.randn(16, 16),
        fixed=fixed,
    )


@pytest.mark.skipif(not has_bfloat16(), reason="this CPU has no bfloat16, so that nothing is rounded to it")
def test_the_report_says_what_costs_a_region_its_bfloat16():
    def function(x, y):
        return x @ x.mT, y @ y.mT

    compiled, report = lowered(function, torch.randn(7, 16, dtype=torch.bfloat16), torch.randn(7, 16))
    given = torch.randn(7, 16, dtype=torch.bfloat16), torch.randn(7, 16)
    compiled(*given)
    (region,) = report.regions
    assert any("the float32 of matmul_1 to 16 bits" in note for note in region.notes)
