"""NaN and infinities through OpenVINO are what torch makes of them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.vendor.openvino.lowering import same

inf, nan = float("inf"), float("nan")
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, inf, -inf, nan, 0.5, 7.0, -2.0, nan, inf])


def mixed(rows: int, columns: int) -> torch.Tensor:
    """Random numbers, a quarter of them special ones; the last rows hold nothing but infinities, or NaN."""
    x = torch.randn(rows, columns)
    places = torch.rand(rows, columns) < 0.25
    x[places] = SPECIAL[torch.randint(0, len(SPECIAL), (int(places.sum()),))]
    x[-1], x[-2], x[-3] = -inf, inf, nan
    x[0] = torch.randn(columns)
    x[1, 0] = -inf
    x[1, 1:] = torch.randn(columns - 1)
    return x


CASES = {
    "comparisons": lambda a, b: (a > b, a >= b, a < b, a <= b, a == b, a != b),
    "comparisons with numbers": lambda a, b: (
        a > 0.5,
        a >= inf,
        a == inf,
        a != inf,
        a <= inf,
        a < -inf,
        a == nan,
    ),
    "kinds": lambda a, b: (a.isnan(), a.isinf(), a.isfinite()),
    "choices": lambda a, b: (torch.where(a > b, a, b), torch.where(a > 0, a, 0.0), a.masked_fill(a < b, nan)),
    "extremes of two": lambda a, b: (torch.maximum(a, b), torch.minimum(a, b)),
    "clamp": lambda a, b: (
        a.clamp(-1, 1),
        a.clamp(min=0),
        a.clamp(max=0),
        torch.clamp(a, min=b),
        torch.clamp(a, b, a),
    ),
    "relu": lambda a, b: (F.relu(a), F.relu6(a), F.hardtanh(a), F.hardsigmoid(a)),
    "extremes": lambda a, b: (
        a.amax(1),
        a.amin(0),
        a.amax((0, 1)),
        a.max(),
        a.min(),
        *torch.aminmax(a, dim=1),
    ),
    "extremes of what is scattered": lambda a, b: (
        a.scatter_reduce(1, (torch.arange(a.shape[1]) // 2).expand(a.shape), b, "amax"),
        a.scatter_reduce(1, (torch.arange(a.shape[1]) // 2).expand(a.shape), b, "amin"),
        a.scatter_reduce(0, (torch.arange(a.shape[0])[:, None] // 3).expand(a.shape), b, "amax"),
    ),
    "extremes with places": lambda a, b: (*a.max(1), *a.min(0), *a.max(1, keepdim=True)),
    "places": lambda a, b: (a.argmax(1), a.argmin(0), a.argmax(), a.argmin(keepdim=True)),
    "sorted": lambda a, b: (*a.sort(dim=1, stable=True), *a.sort(dim=0, descending=True, stable=True)),
    "first": lambda a, b: (a.topk(5, 1)[0], a.topk(5, 1, largest=False)[0]),
    "softmax": lambda a, b: (a.softmax(1), a.softmax(0), a.log_softmax(1), a.log_softmax(0)),
    "logsumexp": lambda a, b: a.logsumexp(1),
    "max_pool": lambda a, b: (F.max_pool1d(a[None], 3, 2, 1), F.max_pool2d(a[None, None], 2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_as_in_torch(name, dtype):
    a, b = mixed(23, 37), mixed(23, 37)
    b[:, ::3] = a[:, ::3]
    same(CASES[name], a.to(dtype), b.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_constants_and_numbers_that_are_infinite(dtype):
    """The plugin folds bfloat16 constants, and takes infinities for finite numbers there."""
    table = torch.tensor([[inf, -inf, nan, 1.0], [0.5, -2.0, inf, -0.0]], dtype=dtype)
    number = torch.tensor(inf, dtype=dtype)

    def function(x):
        return (
            *(x + table, (x - table) * 0.001, table - x, x * table, -table * 0.5),
            *(x - number, torch.full_like(x, -inf) * 0.001, x.masked_fill(x > 0, inf) * 0.001, x - inf),
        )

    same(function, torch.randn(2, 4, dtype=dtype))


@pytest.mark.parametrize("digits", [-1, 2**31 - 1, 0x7F800001, 0x7FC00001])
def test_whatever_the_digits_of_nan_it_stays_one(digits):
    """torch's remainder gives a NaN of ones; of such OpenVINO makes zeros in bfloat16, of others infinities."""
    x = torch.full((5,), digits, dtype=torch.int32).view(torch.float32)
    half = torch.full((5,), digits >> 16 | 1, dtype=torch.int32).to(torch.int16).view(torch.float16)
    same(lambda x, y: (x.to(torch.bfloat16), y.to(torch.bfloat16), x.half(), x[1:].bfloat16() + 1), x, half)
    same(lambda x, y: y.copy_(x), x, torch.zeros(5, dtype=torch.bfloat16))


def test_a_mean_beside_a_variance_of_infinities():
    """torch's running mean is NaN once it has met an infinity."""
    x = mixed(23, 37)
    torch._dynamo.reset()
    options: dict[str, Any] = {"engine": "openvino", "small_regions": "engine", "fallback": "allow"}
    run = torch.compile(lambda x: torch.var_mean(x, 1), backend="dlinfer", options=options)
    for got, want in zip(run(x), torch.var_mean(x, 1), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


FACTORS = {
    "a sum behind": lambda x, w: x * nan + 1,
    "itself behind": lambda x, w: x * nan + x,
    "a product behind": lambda x, w: x * nan + x * 2,
    "a difference": lambda x, w: 1 - x * nan,
    "in a chain": lambda x, w: ((x * nan + 1.0 + x) + 0 + 4) * 2,
    "a quotient": lambda x, w: x / nan + 1,
    "of a product of matrices": lambda x, w: (x @ w) * nan + 1,
    "alpha": lambda x, w: torch.add(x, x, alpha=nan),
    "addcmul": lambda x, w: torch.addcmul(x, x, x, value=nan),
    "infinity": lambda x, w: x * inf + 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fixed", [(), (3, 4)])
@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_that_is_nan(name, fixed, dtype):
    same(FACTORS[name], torch.randn(3, 4, dtype=dtype), torch.randn(4, 4, dtype=dtype), fixed=fixed)


NUMBERS = {
    "cast": lambda x, number: x * number.bfloat16(),
    "short": lambda x, number: x * number.view(1, 1).half(),
    "viewed": lambda x, number: x * number.view(1, 1),
    "computed": lambda x, number: x * (number + 1),
    "negated": lambda x, number: -number * x,
    "not folded": lambda x, number: x * F.mish(number),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_computed_of_a_number_that_is_nan(name):
    number = torch.tensor(nan)
    same(lambda x: NUMBERS[name](x, number) + 1, torch.randn(3, 4))
    short = number.bfloat16()
    same(lambda x: NUMBERS[name](x, short) + 1, torch.randn(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_of_two_factors_is_nan(dtype):
    factors = torch.tensor([nan, 2.0], dtype=dtype)
    same(lambda x: x * factors + 1, torch.randn(3, 2, dtype=dtype), fixed=(2,))


def test_a_weight_of_one_element_that_is_nan():
    number = torch.tensor(nan)
    same(lambda x: (x * number + 1, number * x - x), torch.randn(3, 4))
