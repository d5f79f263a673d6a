"""float32 beside 16 bits keeps its digits. On a CPU without bfloat16 OpenVINO computes all of it in float32 anyway."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlinfer.vendor.openvino.devices import has_bfloat16
from tests.graph.compiling import compiled
from tests.vendor.openvino.lowering import lowered, same

short = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)


def rotated(x, places, frequencies):
    """Angles of thousands, of which bfloat16 has the hundreds."""
    angles = places[:, None].float() * frequencies
    return x * angles.cos().to(x.dtype) + x.roll(1, -1) * angles.sin().to(x.dtype)


@short
@pytest.mark.parametrize("start", [0, 5000, 131072])
def test_rotary_positions(dtype, start):
    frequencies = 1e6 ** (-torch.arange(16) / 16)
    same(rotated, torch.randn(6, 16, dtype=dtype), torch.arange(start, start + 6), frequencies)


def beside(function):
    """A function of what is float32, beside a product in 16 bits that is exact in any order."""
    return lambda x, *given: (F.linear(x, x), function(*given))


def eighths(dtype, *sizes):
    return torch.randint(-8, 9, sizes).to(dtype) / 8


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
    "product of two vectors": lambda y, w: y[0] @ w[0],
    "product of computed vectors": lambda y, w: (y[0] * 1.0001) @ w.norm(dim=0),
    "vector times matrix": lambda y, w: y[0] @ w,
    "matrix times vector": lambda y, w: y @ w[0],
    "stack times vector": lambda y, w: torch.stack((y, y + 1)) @ w[0],
    "vector times stack": lambda y, w: w[0] @ torch.stack((w, w + 1)),
    "linear of a vector": lambda y, w: F.linear(y[0], w, w[0]),
    "linear by a vector": lambda y, w: F.linear(y, w[0]),
    "einsum": lambda y, w: torch.einsum("ab,cb->ca", y, w),
}


@short
@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("fixed", [(16,), (7, 16)])
def test_beside_sixteen_bits(name, dtype, fixed):
    function = BESIDE[name]
    same(
        beside(function),
        eighths(dtype, 7, 16),
        torch.randn(7, 16),
        torch.randn(16, 16),
        fixed=fixed,
    )


OF_WEIGHTS = {
    "alone": lambda w, y: F.mish(w),
    "product": lambda w, y: F.mish(w) * y,
    "absolute": lambda w, y: w.abs() * y,
    "absolute of what is computed": lambda w, y: F.mish(w).abs() + y,
    "running sum": lambda w, y: w.cumsum(1) * y,
    "sum": lambda w, y: F.mish(w).sum() * y,
    "rolled": lambda w, y: w.roll(1, 0) - y,
    "router": lambda w, y: (y @ w.T).softmax(-1).topk(2)[0],
}


@short
@pytest.mark.parametrize("name", OF_WEIGHTS)
@pytest.mark.usefixtures("graph_mode")
def test_of_weights_beside_sixteen_bits(name, dtype):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.randn(7, 16), requires_grad=False)
            self.short = nn.Parameter(eighths(dtype, 16, 16), requires_grad=False)

        def forward(self, x, y):
            return F.linear(x, self.short), OF_WEIGHTS[name](self.wide, y)

    model, x, y = Model().eval(), eighths(dtype, 7, 16), torch.randn(7, 16)
    run = compiled(model, engine="openvino", fallback="error", small_regions="engine")
    for got, wanted in zip(run(x, y), model(x, y), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@short
def test_attention_of_as_many_heads_as_tokens_beside_sixteen_bits(dtype):
    def attention(q, k, v):
        return (
            F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) * 1.0001
        )

    given = [torch.randn(1, 4, 4, 8) for _ in range(3)]
    same(beside(attention), eighths(dtype, 7, 16), *given, fixed=(4, 8, 7, 16))


@short
def test_counts_beside_sixteen_bits(dtype):
    """Bools are counted in float32, of which 16 bits hold no more than 256 or 2048."""
    x, w = eighths(dtype, 4, 4096), eighths(dtype, 4096, 8)

    def function(x, w):
        count = (x > -0.5).sum(1, keepdim=True)
        return F.linear((count % 7).to(x.dtype) * x[:, :8], w[:8])

    same(function, x, w, fixed=(4, 8, 4096))


LARGE = {
    "norm": lambda x: x.norm(dim=-1),
    "normalised": lambda x: F.normalize(x, dim=-1),
    "root of mean squares": lambda x: F.rms_norm(x, (512,), None, 1e-6),
    "layer norm": lambda x: F.layer_norm(x, (512,)),
    "mean": lambda x: x.abs().mean(-1),
    "variance": lambda x: (x / 4).var(-1),
    "mish": lambda x: F.mish(x / 10),
    "softplus": lambda x: F.softplus(x / 100),
}


@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_numbers_that_float16_does_not_hold_inside_of_an_op(name, dtype):
    """Squares and sums of numbers of hundreds, and exponentials."""
    same(LARGE[name], (torch.randn(5, 512) * 400).to(dtype), fixed=(512,))


@short
def test_running_sums_are_rounded_once(dtype):
    x = torch.rand(4, 512).to(dtype)
    wanted = x.double().cumsum(-1)
    compiled, _ = lowered(lambda x: x.cumsum(-1) * 1.0, x, fixed=(512,))
    off = (compiled(x)[0].double() - wanted).abs() / wanted
    assert off.max() <= torch.finfo(dtype).eps


@pytest.mark.skipif(not has_bfloat16(), reason="this CPU has no bfloat16, so that nothing is rounded to it")
def test_the_report_says_what_costs_a_region_its_bfloat16():
    def function(x, y):
        return x @ x.mT, y @ y.mT

    compiled, report = lowered(function, torch.randn(7, 16, dtype=torch.bfloat16), torch.randn(7, 16))
    given = torch.randn(7, 16, dtype=torch.bfloat16), torch.randn(7, 16)
    compiled(*given)
    (region,) = report.regions
    assert any("the float32 values of matmul_1 to 16 bits" in note for note in region.notes)
