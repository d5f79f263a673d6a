"""Pointwise ops of 16-bit floats against float64, from tiny to large numbers.

Some are formulas whose parts cancel. The plugin would compute these parts in bfloat16 on a CPU that has it.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.vendor.openvino.lowering import lowered

SIZES = torch.logspace(-12, 1.5, 60)
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
X = torch.cat([-SIZES, SIZES, SPECIAL])
TINY = {torch.bfloat16: 1e-35, torch.float16: 3e-7}
"""Smaller numbers may be 0."""
ROUNDINGS = 8
"""Of the result's dtype, or as many times as far off as torch is."""

FUNCTIONS = {
    "acosh": lambda x: torch.acosh(x.abs() + 1),
    "asinh": torch.asinh,
    "atanh": torch.atanh,
    "celu": lambda x: F.celu(x, alpha=0.5),
    "elu": lambda x: F.elu(x, alpha=0.5),
    "erf": torch.erf,
    "erfc": torch.erfc,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "log1p": lambda x: torch.log1p(x.abs()),
    "log2": lambda x: x.abs().log2(),
    "log_sigmoid": F.logsigmoid,
    "logaddexp": lambda x: torch.logaddexp(x, -x),
    "mish": F.mish,
    "power": lambda x: x.abs() ** 1.7,
    "rsqrt": lambda x: x.abs().rsqrt(),
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sinh": torch.sinh,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "xlogy": lambda x: torch.xlogy(x, x.abs() + 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_float64(name: str, dtype: torch.dtype) -> None:
    function, x = FUNCTIONS[name], X.to(dtype)
    run, _ = lowered(function, x, fallback="allow")
    exact = function(x.double()).to(dtype).double()  # the dtype's infinity for numbers beyond its range
    ours, torchs = run(x)[0].double(), function(x).double()
    allowed = ROUNDINGS * torch.maximum(distance(torchs, exact, dtype), torch.ones_like(exact))
    wrong = (distance(ours, exact, dtype) > allowed) & (ours != torchs) & ~(ours.isnan() & torchs.isnan())
    assert not wrong.any(), [
        (x[i].item(), ours[i].item(), exact[i].item()) for i in wrong.nonzero().flatten()
    ]


def distance(one: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """In roundings of a dtype; 0 where both are the same infinity or NaN, infinite where only one of them is."""
    same = (one == exact) | (one.isnan() & exact.isnan())
    apart = (one - exact).abs() / (exact.abs() * torch.finfo(dtype).eps + TINY[dtype])
    return torch.where(same, 0.0, apart.nan_to_num(torch.inf, torch.inf))
