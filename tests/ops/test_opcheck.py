"""torch's own check of every op on every sample: schema, fake function, functionalisation, dynamic shapes.

The last two trace the op, which takes ten times as long as the rest and asks no dtype of any tensor but the fake
function's; so float32 stands for all.

opcheck copies arguments apart, so samples that alias are tested in ``test_compile.py`` instead.
"""

import pytest
import torch

from dlinfer import ops
from tests.ops import cases

CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")
ALL = (*CHEAP, "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.short)
@pytest.mark.parametrize(("op", "name"), cases.names(aliased=False))
def test_opcheck(op, name, dtype):
    checks = ALL if dtype is torch.float32 else CHEAP
    torch.library.opcheck(ops.registry()[op].overload, cases.sample(op, name, dtype).args, test_utils=checks)
