"""What ONNX Runtime's kernels or their translations compute otherwise than torch is computed by torch, and said."""

from math import inf, nan

import pytest
import torch
import torch.nn.functional as F

from dlinfer.errors import GraphFallbackError
from dlinfer.ops import fused_moe
from tests.vendor.onnxruntime.regions import as_in_eager, compiled, refused, subgraph

FLOATS, INTEGERS = torch.randn(4, 6), torch.randint(-9, 9, (4, 6))
LEFT = {
    "erfc": (torch.erfc, FLOATS),
    "expm1": (torch.expm1, FLOATS),
    "log1p": (torch.log1p, FLOATS),
    "elu": (F.elu, FLOATS),
    "selu": (F.selu, FLOATS),
    "logsigmoid": (F.logsigmoid, FLOATS),
    "logsigmoid below autocast": (lambda x: torch.ops.aten.log_sigmoid_forward(x)[0], FLOATS),
    "logaddexp": (lambda x: torch.logaddexp(x, x * 2), FLOATS),
    "atan2": (lambda x: torch.atan2(x, x * 2), FLOATS),
    "xlogy": (lambda x: torch.xlogy(x, x.abs()), FLOATS),
    "signbit": (torch.signbit, FLOATS),
    "diagonal": (lambda x: x.diagonal() * 1, FLOATS),
    "fewer chunks than asked for": (lambda x: x[:1].chunk(2, 0)[0] * 2, FLOATS),
    "floored quotients": (lambda x: x // 0.7, FLOATS),
    "floored quotients of whole numbers": (lambda x: torch.div(x, 0.001, rounding_mode="floor"), INTEGERS),
    "extremes that are scattered": (lambda x: x.scatter_reduce(1, x.argsort(1), x, "amax"), FLOATS),
    "products of whole numbers": (lambda x: x.prod(0), INTEGERS),
    "halves that are added to rows": (lambda x: x.index_add(0, torch.tensor([1, 0]), x[:2]), FLOATS.half()),
    "halves that are scattered": (lambda x: x.scatter_add(1, x.argsort(1), x), FLOATS.half()),
    "halves that are put": (lambda x: x.index_put((x.argsort(0)[0] % 4,), x[0], True), FLOATS.half()),
    "log_softmax of float64": (lambda x: F.log_softmax(x, 0), FLOATS.double()),
    "extremes of float64": (lambda x: x.min(1)[1], FLOATS.double()),
    "logarithms of float64": (lambda x: torch.log2(x.abs()), FLOATS.double()),
    "numbers for float64": (lambda x: x.masked_fill(x > 0, 0.1), FLOATS.double()),
    "multiples of float64": (lambda x: torch.add(x, x, alpha=0.1), FLOATS.double()),
    "powers of whole numbers": (lambda x: x.abs() ** x, INTEGERS),
}


@pytest.mark.parametrize("name", LEFT)
def test_it_is_refused_with_a_reason(name):
    function, x = LEFT[name]
    assert any("ONNX Runtime's" in reason for reason in refused(subgraph(function, x)).values())


def test_tails_of_sigmoid():
    def tails(x):
        return torch.sigmoid(x), F.silu(x), torch.sign(x)

    x = torch.tensor([-104.0, -88.5, -30.0, -18.0, -9.0, 0.0, -0.0, 30.0, nan])
    run = compiled(tails, x).run
    for got, want in zip(run(x), tails(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-38, equal_nan=True)


def test_tails_of_glu():
    x = torch.tensor([-88.5, -30.0, -18.0, -9.0, 0.0, 30.0])
    both = torch.cat([torch.ones(6), x])[None]
    torch.testing.assert_close(
        compiled(F.glu, both, fixed=True).run(both)[0], F.glu(both), rtol=1e-6, atol=1e-38
    )


@pytest.mark.parametrize("static", [(), (1, 2)])
def test_experts_of_small_and_of_infinite_results(static):
    """With the weights of all experts in one tensor, and with each expert's own."""

    def layer(x, gate_up, down, weights, ids):
        return fused_moe(x, gate_up, down, weights, ids, 1, False)

    x = -torch.linspace(0.1, 20, 32).view(4, 8) / 8
    gate_up = torch.stack([torch.ones(16, 8), torch.full((16, 8), -1e20)])
    down = torch.stack([torch.ones(8, 8), torch.full((8, 8), 1e38)])
    given = (x, gate_up, down, torch.ones(4, 1), torch.tensor([[0], [0], [1], [0]]))
    run = compiled(layer, *given, static=static, fixed=True).run
    torch.testing.assert_close(run(*given)[0], layer(*given), rtol=1e-5, atol=1e-38)


DOUBTFUL = {
    "amax": lambda x: x.amax(0),
    "max": lambda x: x.max(-1)[0],
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(2, -1)[0],
    "sort": lambda x: x.sort(-1)[0],
    "clamp": lambda x: x.clamp(-5, 100),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
}
BEYOND = torch.tensor([[2**31, -(2**31) - 1, 2**53 + 1], [2**24 + 1, 7, -(2**53) - 1]])
NOT_NUMBERS = torch.tensor([[1.0, nan, inf], [-inf, 2.0, nan]])


@pytest.mark.parametrize("numbers", [BEYOND, NOT_NUMBERS], ids=["int64", "NaN"])
@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_call_of_numbers_that_it_orders_otherwise_is_left_to_torch(name, numbers):
    function = DOUBTFUL[name]
    small = torch.arange(6).view(2, 3).to(numbers.dtype)
    run, strict = (
        compiled(function, small, fixed=True, fallback=policy).run for policy in ("allow", "error")
    )
    for x in (small, numbers, small + 1):
        as_in_eager(run, function, x)
    as_in_eager(strict, function, small)
    if numbers is NOT_NUMBERS and name != "sort":
        as_in_eager(strict, function, numbers)  # written so that NaN comes through
        return
    with pytest.raises(GraphFallbackError, match="a NaN, or an int64"):
        strict(numbers)


def test_sums_of_int64():
    run = compiled(lambda x: x.sum(0), INTEGERS, fallback="allow").run
    for x in (INTEGERS, INTEGERS + 2**53, INTEGERS):
        as_in_eager(run, lambda x: x.sum(0), x)


@pytest.mark.parametrize("mode", ["trunc", "floor"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_rounded_quotients_of_whole_numbers(mode, dtype):
    """Floats do not hold all numbers above 2^24."""
    most = torch.iinfo(dtype).max
    x = torch.tensor([most, -most, 7, -7, 6, -6, 0, min(most, 2**24 + 1), min(most, 2**53 + 1)], dtype=dtype)
    y = torch.tensor([7, 7, -2, -2, 3, -3, 5, 3, -9], dtype=dtype)

    def divided(x, y):
        return torch.div(x, y, rounding_mode=mode), torch.div(x, 7, rounding_mode=mode)

    run = compiled(divided, x, y).run
    for got, want in zip(run(x, y), divided(x, y), strict=True):
        assert torch.equal(got, want)
