"""Whole numbers of fewer than 64 bits: numbers that their dtype does not hold, and their bools."""

import pytest
import torch

from tests.vendor.openvino.lowering import lowered, same

WRAPPED = {
    "clamp": lambda x: x.clamp(-5, 100),
    "floored quotient": lambda x: x // -7,
    "remainder": lambda x: x % -3,
    "sum": lambda x: x + 300,
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_number_that_the_dtype_does_not_hold_is_left_to_torch(name):
    x = torch.tensor([0, 1, 5, 200, 255], dtype=torch.uint8)
    compiled, report = lowered(WRAPPED[name], x, fallback="allow")
    assert "does not fit into its tensor" in str(report.refusals())
    assert torch.equal(compiled(x)[0], WRAPPED[name](x))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.int64])
def test_bools_of_whole_numbers(dtype):
    limits = torch.iinfo(torch.int32 if dtype is torch.int64 else dtype)
    x = torch.tensor(
        [limits.min, limits.max, 0, 1, limits.max // 2 + 1, limits.min // 2 - 1 if limits.min else 3]
    )
    same(lambda a: (a.bool(), a.logical_not(), a.any()), x.to(dtype))


WRAPS = {
    "sum": lambda x: x + x.flip(0),
    "difference": lambda x: x[1:] - x[:-1],
    "difference from a number": lambda x: 5 - x,
    "product": lambda x: x * x.flip(0),
    "sign": lambda x: -x,
    "size": lambda x: x.abs(),
    "power": lambda x: x**2,
    "sum of all": lambda x: x.sum(dtype=x.dtype),
    "running sum": lambda x: x.cumsum(0, dtype=x.dtype),
    "three": lambda x: torch.addcmul(x, x, x),
    "conversion": lambda x: (x.int() * 3 + 1).to(x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("name", WRAPS)
def test_what_reads_a_number_that_wrapped_around_sees_it_so(name, dtype):
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.max, limits.min, 1, limits.max - 7, limits.max // 2 + 3, 0], dtype=dtype)
    function = WRAPS[name]
    same(lambda x: (function(x) % 7, function(x) > 3, function(x).float() * 2, function(x)), x)
