"""Fakes of tensors with symbolic sizes, for tests that need no model around them."""

from collections.abc import Collection
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from dlinfer.graph.torch_private import fake_mode


def symbolic(*values: Any, fixed: Collection[int] = ()) -> list[Any]:
    """A fake for each tensor, every size a symbol but 0, 1 and those in ``fixed``, and a number for each int.

    Equal sizes are one symbol.
    """
    tensors = [id(value) for value in values if isinstance(value, torch.Tensor)]
    assert len(set(tensors)) == len(tensors), "one tensor given twice would be one fake"
    mode = fake_mode.fresh_mode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        kinds = [DimDynamic.STATIC if size in fixed else DimDynamic.DUCK for size in tensor.shape]
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(kinds))

    return [
        fake(value) if isinstance(value, torch.Tensor) else mode.from_tensor(torch.empty(value)).shape[0]
        for value in values
    ]
