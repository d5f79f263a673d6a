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
    assert "does not hold" in str(report.refusals())
    assert torch.equal(compiled(x)[0], WRAPPED[name](x))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.int64])
def test_bools_of_whole_numbers(dtype):
    limits = torch.iinfo(torch.int32 if dtype is torch.int64 else dtype)
    x = torch.tensor(
        [limits.min, limits.max, 0, 1, limits.max // 2 + 1, limits.min // 2 - 1 if limits.min else 3]
    )
    same(lambda a: (a.bool(), a.logical_not(), a.any()), x.to(dtype))
