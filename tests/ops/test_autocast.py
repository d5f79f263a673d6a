"""Autocast changes no result of an op: it has the dtype that the op states, whoever computes it."""

import pytest
import torch

from dlinfer import ops, vendor
from tests.ops import cases


@pytest.mark.parametrize(("op", "name"), sorted(cases.first_names()))
@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
def test_the_same_bits_as_without(vendor_name, op, name):
    vendor.use(vendor_name)
    spec = ops.registry()[op]
    plain, cast = (cases.sample(op, name, torch.float32).args for _ in range(2))
    want = cases.results(spec, plain, spec.overload(*plain))
    with torch.autocast("cpu", torch.bfloat16):
        got = cases.results(spec, cast, spec.overload(*cast))
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_layout_that_the_kernel_leaves_to_the_reference():
    vendor.use("cpu")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert ops.linear(torch.ones(3, 8), torch.ones(8, 2).t()).dtype == torch.float32
