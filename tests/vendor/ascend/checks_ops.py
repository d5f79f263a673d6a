"""Each op on the simulated NPU against its reference in float64: the samples of the interface, in all dtypes.

``NATIVE`` of each op's samples the vendor's documents admit; the others are refused with a reason and counted. Sizes
that real models have are in checks_sizes.py.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer import settings
from dlinfer.ops.core import fallback
from dlinfer.vendor.ascend import VENDOR
from dlinfer.vendor.ascend.kernels import KERNELS
from tests.ops import cases
from tests.ops.in_turn import InTurn, names
from tests.vendor.ascend.simulated_npu import install

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LAYOUT = VENDOR.kv_cache_layout
SAMPLES = InTurn(install.NAME, LAYOUT)
answered: Counter[tuple[str, str, bool]] = Counter()
"""(op, dtype, whether the kernel answered) -> samples."""


def compare(op, args: tuple, dtype: torch.dtype) -> dict:
    """Run an op on the device and its reference in float64 on the host; gives the fallbacks taken."""
    want = cases.expected(op, pytree.tree_map_only(Tensor, Tensor.cpu, args))
    fallback.reset()
    with settings.override(fallback="allow"):
        returned = op.overload(*args)
    found = cases.results(op, args, returned)
    assert {tensor.device.type for tensor in found} <= {install.NAME}
    cases.assert_close(pytree.tree_map_only(Tensor, Tensor.cpu, found), want, op.tolerances[dtype])
    return fallback.counts()


@pytest.mark.parametrize(("op", "name", "dtype"), list(names(LAYOUT, DTYPES, KERNELS)))
def test_every_sample(op, name, dtype):
    args = SAMPLES.arguments(op, name, dtype)
    kept = pytree.tree_map_only(Tensor, lambda one: one.cpu().clone(), args)
    taken = compare(op, args, dtype)
    answered[op.name, cases.short(dtype), not taken] += 1
    for parameter, before, after in zip(op.parameters, kept, args, strict=True):
        if isinstance(before, Tensor) and parameter not in op.mutates and not aliased(args, parameter, op):
            assert same(before, after.cpu()), f"{parameter} was written"
    if op.name not in KERNELS:
        assert [kind.reason for kind in taken] == ["the vendor has no kernel for this op"]


def aliased(args: tuple, parameter: str, op) -> bool:
    """Whether an argument shares memory with one that the op writes."""
    one = args[op.parameters.index(parameter)]
    written = [args[op.parameters.index(name)] for name in op.mutates]
    return any(one.untyped_storage()._cdata == other.untyped_storage()._cdata for other in written)


def same(one: Tensor, other: Tensor) -> bool:
    if one.is_floating_point() and one.itemsize > 1:
        return torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0))
    return torch.equal(
        cases.steps(one) if one.itemsize == 1 and one.dtype is not torch.bool else one,
        cases.steps(other) if other.itemsize == 1 and other.dtype is not torch.bool else other,
    )
