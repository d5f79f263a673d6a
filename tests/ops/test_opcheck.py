"""torch's own check of every op on every sample: schema, fake function, functionalisation, dynamic shapes.

opcheck copies arguments apart, so samples that alias are tested in ``test_compile.py`` instead.
"""

import pytest
import torch

from dlinfer import ops
from tests.ops import cases


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.short)
@pytest.mark.parametrize(("op", "name"), cases.names(aliased=False))
def test_opcheck(op, name, dtype):
    torch.library.opcheck(ops.registry()[op].overload, cases.sample(op, name, dtype).args)
