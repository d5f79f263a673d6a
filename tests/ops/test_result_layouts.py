"""Results lie as the op's fake says, whichever kernel made them and however the arguments lie.

Compiled code reads a result by the strides of its fake; it has nothing else to read it by.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from dlinfer import ops, settings, vendor
from tests.ops import cases


def turned(value: Any) -> Any:
    """The same elements in memory whose dimensions lie in reverse order."""
    if isinstance(value, list):
        return [turned(one) for one in value]
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    backwards = tuple(reversed(range(value.dim())))
    return value.permute(backwards).contiguous().permute(backwards)


def strides(returned: Any) -> list[list[int]]:
    """Of each result, where it has more than one element in a dimension."""
    found = [] if returned is None else [returned] if isinstance(returned, Tensor) else list(returned)
    return [
        [stride for size, stride in zip(one.shape, one.stride(), strict=True) if size > 1] for one in found
    ]


@pytest.mark.parametrize(("op", "name"), cases.names(aliased=False))
@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
def test_strides_are_those_of_the_fake(vendor_name: str, op: str, name: str):
    vendor.use(vendor_name)
    spec = ops.registry()[op]
    given = cases.sample(op, name, torch.float32).args
    args = [
        one if parameter in spec.mutates else turned(one)
        for parameter, one in zip(spec.parameters, given, strict=True)
    ]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = pytree.tree_map_only(Tensor, mode.from_tensor, args)
        expected = strides(spec.overload(*fakes))
    # Caches that lie so fall back to torch, which is counted: the layout of what is returned is the same.
    with settings.override(fallback="allow"):
        assert strides(spec.overload(*args)) == expected
