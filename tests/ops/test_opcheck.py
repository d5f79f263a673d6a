"""torch's own check of every op on every sample: schema, fake function, functionalisation, dynamic shapes.

The last traces the op, which takes ten times as long as the rest and asks no dtype of any tensor but the fake
function's; so float32 stands for all, and in the gate one sample of each op.

opcheck copies arguments apart, so samples that alias are tested in ``test_compile.py`` instead.
"""

import pytest
import torch

from dlinfer import ops
from tests.ops import cases

CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED = "test_aot_dispatch_dynamic"
FIRST = cases.first_names()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.short)
@pytest.mark.parametrize(("op", "name"), cases.names(aliased=False))
def test_opcheck(op, name, dtype):
    traced = dtype is torch.float32 and (op, name) in FIRST
    _check(op, name, dtype, (*CHEAP, TRACED) if traced else CHEAP)


@pytest.mark.full
@pytest.mark.parametrize(("op", "name"), cases.names(aliased=False))
def test_every_sample_is_traced(op, name):
    _check(op, name, torch.float32, (TRACED,))


def _check(op, name, dtype, checks):
    args = cases.sample(op, name, dtype).args
    if any(isinstance(arg, torch.Tensor) and arg.dtype is torch.float8_e4m3fn for arg in args):
        checks = [
            check for check in checks if check != "test_schema"
        ]  # it compares, which torch cannot in float8
    torch.library.opcheck(ops.registry()[op].overload, args, test_utils=checks)
