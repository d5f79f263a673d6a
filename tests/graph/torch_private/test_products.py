"""Matrix products."""

import torch

from dlinfer.graph.torch_private.products import int_mm


def test_int8_is_multiplied_into_int32():
    a = torch.randint(-9, 9, (5, 7), dtype=torch.int8)
    b = torch.randint(-9, 9, (3, 7), dtype=torch.int8).t()
    assert torch.equal(int_mm(a, b), a.int() @ b.int())
    assert int_mm(a[:0], b).shape == (0, 3)
