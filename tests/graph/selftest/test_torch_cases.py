"""The expected results of cases are torch's own, so that no engine is refused for doing what torch does."""

import pytest
import torch
from torch.utils import _pytree as pytree

from dlinfer.graph.selftest.torch_cases import ROUNDED, TORCH_CASES
from dlinfer.utils.closeness import difference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", TORCH_CASES, ids=lambda case: case.name)
def test_torch_passes(case, dtype):
    results = pytree.tree_leaves(case.function(*case.inputs(dtype)))
    tolerance = max((case.tolerance or {}).get(dtype, 0.0), 4 * ROUNDED[dtype] if case.tolerance else 0.0)
    assert difference(results, case.expected(dtype), rtol=tolerance, atol=tolerance) is None


def test_each_case_has_a_name_of_its_own_and_covers_something():
    names = [case.name for case in TORCH_CASES]
    assert len(set(names)) == len(names)
    assert all(op.startswith(("aten.", "dlinfer.")) for case in TORCH_CASES for op in case.covers)
