"""Elementwise functions where their textbook formulas subtract what is nearly equal: every digit that torch has."""

import pytest
import torch
import torch.nn.functional as F

from tests.vendor.openvino.lowering import lowered, same

inf, nan = float("inf"), float("nan")
SIZES = torch.cat([torch.logspace(-30, 1.9, 200), torch.tensor([0.0, 18.0, 20.0, 20.5, 88.0, 1e30])])
EVERYWHERE = torch.cat([SIZES, -SIZES, torch.linspace(-30, 30, 200), torch.tensor([nan])])

FUNCTIONS = {
    "softplus": F.softplus,
    "softplus with beta": lambda x: F.softplus(x, 2.5, 10.0),
    "root of softplus": lambda x: F.softplus(x / 2).sqrt(),
    "logsigmoid": F.logsigmoid,
    "elu": F.elu,
    "elu with alpha": lambda x: F.elu(x, 1.5),
    "mish": F.mish,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "sinh": lambda x: torch.sinh(x / 2),
    "asinh": torch.asinh,
    "atanh": lambda x: torch.atanh(x / 100),
    "tanh": torch.tanh,
    "silu": F.silu,
    "logaddexp with 0": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_result_has_its_digits(name: str):
    """Relative error alone counts, down to where float32 loses digits itself."""
    same(FUNCTIONS[name], EVERYWHERE, rtol=2e-5, atol=1e-36)


def test_of_two_operands():
    x, y = EVERYWHERE[:-1], EVERYWHERE[:-1].flip(0)
    compiled, _ = lowered(torch.logaddexp, x, y)
    torch.testing.assert_close(
        compiled(x, y)[0], torch.logaddexp(x.double(), y.double()).float(), rtol=2e-5, atol=1e-12
    )
    infinite = torch.tensor([inf, -inf, inf, nan, 1.0, -inf]), torch.tensor([inf, -inf, -inf, 1.0, nan, 3.0])
    same(torch.logaddexp, *infinite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lerp_reaches_both_ends(dtype: torch.dtype):
    x, end = torch.tensor([1e4, -3e4, 1.0, 0.0]).to(dtype), torch.tensor([1.0, 1e-3, 1e4, -0.5]).to(dtype)
    weights = torch.tensor([0.0, 1.0, 0.5, 0.25]).to(dtype)
    same(lambda a, b: [torch.lerp(a, b, w) for w in (0.0, 1.0, 0.5, 0.9, -2.0)], x, end)
    same(lambda a, b, w: [torch.lerp(a, b, w), torch.lerp(a, b, 1 - w)], x, end, weights)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_spread_around_a_large_mean(offset: float):
    x = torch.randn(6, 256) + offset
    # Rounding of the mean shifts all differences by up to half a unit in its last place.
    loose = abs(offset) * 2.0**-23
    same(lambda a: (a.var(1), a.std(1), a.var(1, correction=0)), x, fixed=(256,), rtol=1e-4, atol=loose**2)
    same(lambda a: F.layer_norm(a, (256,)), x, fixed=(256,), rtol=1e-4, atol=1e-5 + loose)


def test_softmax_of_large_and_infinite_logits():
    x = torch.tensor([[1e4, 1e4 - 1, -1e4], [-inf, 0.0, -200.0], [88.0, 89.0, 90.0]])
    same(lambda a: (a.softmax(1), a.log_softmax(1), a.logsumexp(1)), x)
    rows = torch.tensor([[-inf, -inf], [inf, 0.0], [inf, -inf], [inf, inf]])
    same(lambda a: a.logsumexp(1), rows)


def test_products_by_zero_read_no_matrices():
    """torch takes what is added alone, even where a matrix holds NaN."""
    y, z, x = torch.full((2, 3), nan), torch.randn(3, 4), torch.randn(2, 4)
    _, report = lowered(lambda x, y, z: torch.addmm(x, y, z, alpha=0), x, y, z, fallback="allow")
    assert [reason for _, reason in report.refusals()] == [
        "the factor of a product is 0, so its matrices must not be read"
    ]
    same(lambda x, y, z: torch.addmm(x, y, z, beta=0, alpha=0.5), x * nan, y.nan_to_num(1.0), z)
