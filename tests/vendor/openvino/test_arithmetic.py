"""Arithmetic, comparisons and elementary functions: torch's dtypes, signs, rounding and special values."""

import functools
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vendor.openvino.lowering import lowered, same

inf, nan = float("inf"), float("nan")
x, y = torch.randn(3, 5), torch.randn(3, 5)
wider = ((torch.randn(4, 5), torch.randn(4, 5)), (torch.randn(9, 5), torch.randn(9, 5)))


@pytest.mark.parametrize(
    "function", [torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32])
def test_two_tensors(function, dtype):
    cases = [tuple((10 * one).to(dtype) for one in pair) for pair in ((x, y), *wider)]
    for _, second in cases:
        second[second == 0] = 1
    same(function, *cases[0], others=cases[1:])


def test_operands_of_different_dtypes_and_sizes():
    half, whole, flag = x.bfloat16(), torch.arange(5), x > 0
    same(lambda a, b: (a + b, a * b, b - a, a > b), x, whole)
    same(lambda a, b: (a + b, a / b), half, whole + 1)
    same(lambda a, b: (a + b, a * b, a & b, a | b, a ^ b), flag, y > 0)
    same(lambda a, b: (a + b, a * b), flag, whole)
    same(lambda a, b: a.unsqueeze(1) * b.unsqueeze(0), x, y)
    same(lambda a: (a + 1, a + 1.5, 2 - a, a / 2, 1 / a, a * True), whole + 1)
    same(lambda a: (a / 3, a + 0.1, a * 0.3), half)  # numbers that 16 bits do not hold


def test_alpha_and_triples():
    same(lambda a, b: (torch.add(a, b, alpha=3), torch.sub(a, b, alpha=0.5), torch.rsub(a, 2, alpha=3)), x, y)
    same(lambda a, b: (torch.addcmul(a, b, a, value=2), torch.addcdiv(a, b, b.abs() + 1, value=-1)), x, y)
    same(lambda a, b: (torch.lerp(a, b, 0.3), torch.lerp(a, b, b)), x, y)
    same(lambda a: (a.clamp(-0.5, 0.5), a.clamp(min=0), a.clamp(max=0.1), a.clip(0, 1)), x)
    same(lambda a, b: (torch.clamp(a, b, b + 1), torch.clamp(a, min=b)), x, y)


WHOLE = torch.tensor([7, -7, 7, -7, 0, 1, 2**24 + 1, -(2**24) - 3, 2**31 - 1, -(2**31) + 1, 100_000_007])
BY = torch.tensor([3, 3, -3, -3, 5, 2**24 + 3, 1, 7, 2, 10, 3])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_division_of_whole_numbers_is_exact_with_torch_s_signs(dtype):
    def divided(a, b):
        rounded = [torch.div(a, b, rounding_mode=mode) for mode in ("floor", "trunc")]
        return *rounded, a // b, a % b, torch.fmod(a, b), torch.remainder(a, b)

    same(divided, WHOLE.to(dtype), BY.to(dtype))
    if dtype == torch.int32:
        smallest = torch.full_like(BY, -(2**31)).to(dtype)  # it has no absolute value
        same(divided, WHOLE.to(dtype), smallest)
        same(divided, smallest, BY.to(dtype))
    same(lambda a: (a // 16, a % 16, a // 7, a % 7, a // -7, a % -7), WHOLE.to(dtype))


@settings(max_examples=25, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.integers(-(2**31) + 1, 2**31 - 1), st.integers(-(2**31) + 1, 2**31 - 1)), min_size=2
    )
)
def test_division_of_any_whole_numbers(pairs):
    a, b = torch.tensor(pairs).unbind(1)
    b = torch.where(b == 0, 1, b)
    (quotient, rest), expected = division()(a, b), (a // b, a % b)
    assert torch.equal(quotient, expected[0])
    assert torch.equal(rest, expected[1])


@functools.cache
def division():
    """Compiled once for all examples."""
    a, b = torch.ones(7, dtype=torch.int64), torch.ones(7, dtype=torch.int64)
    return lowered(lambda a, b: (a // b, a % b), a, b)[0]


FLOATS = torch.tensor([5.5, -5.5, 5.5, -5.5, 1.0, 0.0, 3e38, -1e-30, inf, nan])


def test_division_of_floats():
    by = torch.tensor([3.0, 3.0, -3.0, -3.0, 0.1, 2.0, 7.0, 3.0, 2.0, 1.0])
    same(lambda a, b: a / b, FLOATS, by)
    same(
        lambda a: (
            *(a // 2, a // -0.5, a % 2, a % -2, torch.fmod(a, 4), torch.frac(a), torch.trunc(a)),
            torch.div(a, -0.5, rounding_mode="trunc"),
        ),
        FLOATS[:8],
    )
    same(lambda a: (a // 2, a % 2, torch.fmod(a, 4)), FLOATS)


def cut(a: torch.Tensor, b: Any) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


@pytest.mark.parametrize("divided", [operator.floordiv, operator.mod, torch.fmod, cut])
@pytest.mark.parametrize("by", [0.1, 3, torch.rand(10)], ids=["number", "whole number", "tensor"])
def test_remainders_of_floats_are_taken_of_powers_of_two_only(divided, by):
    """1.0 // 0.1 is 9: the quotient rounds to 10, and the remainder with it."""
    given = (FLOATS, by) if isinstance(by, torch.Tensor) else (FLOATS,)
    _, report = lowered(lambda a, b=by: divided(a, b), *given, fallback="allow")
    ((_, reason),) = report.refusals()
    assert "float remainder" in reason


@pytest.mark.parametrize(
    "compare", [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
)
def test_comparisons_are_exact(compare):
    near = torch.tensor([2**24, 2**24 + 1, 5, -5, 0])
    same(lambda a, b: (compare(a, b), compare(a, 5), compare(a, 2**24 + 1)), near, near.flip(0) + 1)
    same(
        lambda a, b: (compare(a, b), compare(a, 0.5)),
        torch.tensor([0.0, -0.0, inf, -inf, nan, 1.0]),
        torch.tensor([0.0, 0.0, inf, inf, nan, 2.0]),
    )
    same(compare, torch.tensor([True, False, True]), torch.tensor([True, True, False]))
    same(lambda a: (compare(a, 2), compare(a, 2.5)), torch.tensor([1, 2, 3], dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_small_whole_numbers_wrap_around(dtype):
    values = torch.arange(-130, 130).to(dtype)
    same(lambda a: (a + a, a * a, a - 100, -a, a.abs()), values)


def test_logic_and_bits():
    same(
        lambda a, b: (a.logical_and(b), a.logical_or(b), a.logical_xor(b), a.logical_not()),
        x.round(),
        y.round(),
    )
    same(lambda a, b: (a & b, a | b, a ^ b, ~a, a & 12), WHOLE, BY)
    same(lambda a: (~a, a.logical_not()), x > 0)


def test_choices():
    same(lambda a, b: (torch.where(a > 0, a, b), torch.where(a > 0, a, 0), torch.where(a > 0, 1.0, b)), x, y)
    same(lambda a: (a.masked_fill(a > 0, -inf), torch.where(a > 0, a > 1, a < 1)), x)
    same(lambda a: torch.where(a, a, a.logical_not()), x > 0)


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, inf, -inf, nan, 1e-8, 88.0, -104.0, 3e38])


@pytest.mark.parametrize(
    "name",
    """exp log sqrt sin cos tanh sigmoid erf rsqrt reciprocal exp2 log2 log10 log1p expm1 erfc floor ceil round trunc
    abs neg sign isnan isinf isfinite square atan asinh""".split(),
)
def test_elementary_functions(name):
    function = getattr(torch, name)
    same(function, x, others=[(torch.randn(7, 5) * 3,)])
    if name not in ("sin", "cos"):  # of 3e38 they are as good as random
        same(function, SPECIAL)
    same(function, x.bfloat16())


def test_functions_of_whole_numbers_are_floats():
    same(
        lambda a: (a.exp(), a.sqrt(), a.float().log(), a.sigmoid(), a.floor(), a.abs(), a.neg(), a.sign()),
        torch.arange(1, 6),
    )


def test_powers():
    same(lambda a: (a**2, a**3, a**0, a**1, a.abs() ** 0.5, a.abs() ** -1.5, 2.0**a, a**4), x)
    same(lambda a, b: a.abs() ** b, x, y)
    same(lambda a: (a**2, a**3, a**0), torch.tensor([1289, -7, 0]))  # the largest cube of 32 bits
    same(lambda a: torch.logaddexp(a, a.flip(0)), SPECIAL)


REFUSED = {
    "float64": (lambda a: a.double() * 2, "float64"),
    "complex": (lambda a: torch.view_as_complex(a.reshape(-1, 2)) * 2, "complex64"),
    "a power of integers": (lambda a: a.int() ** 7, "computes in float32"),
    "no lowering": (torch.digamma, "no lowering for aten.digamma"),
    "random": (torch.rand_like, "random generator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name):
    function, reason = REFUSED[name]
    compiled, report = lowered(function, torch.randn(4, 6), fallback="allow")
    assert any(reason in node.reason for node in report.placed("eager"))
    if name not in ("random", "complex"):
        torch.testing.assert_close(compiled(x[:, :4].contiguous())[0], function(x[:, :4]), equal_nan=True)


@pytest.mark.usefixtures("graph_mode")
def test_a_number_is_copied_under_another_default_dtype():
    """Under float64 the graph has the number itself, and not a tensor of it."""
    options: dict[str, Any] = {"engine": "openvino", "small_regions": "engine"}
    torch.set_default_dtype(torch.float64)
    try:
        run = torch.compile(lambda x: (x * 2).copy_(0.001), backend="dlinfer", options=options)
        result = run(torch.ones(3, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(result, torch.full((3,), 0.001))
