"""NaN and infinities through ONNX Runtime are what torch makes of them."""

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.vendor.onnxruntime.regions import compiled
from tests.vendor.openvino.test_nan import CASES, mixed

NAMES = [
    name
    for name in CASES
    if name
    not in (
        "sorted",
        "max_pool",
        "logsumexp",
        "comparisons with numbers",
        "relu",
        "extremes of what is scattered",
    )
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_as_in_torch(name, dtype):
    a, b = (mixed(23, 37).to(dtype) for _ in range(2))
    expected = pytree.tree_leaves(CASES[name](a, b))
    results = compiled(CASES[name], a, b).run(a, b)
    bound = 1e-5 if dtype == torch.float32 else 2e-3
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)
