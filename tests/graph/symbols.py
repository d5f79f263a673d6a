"""Fakes of tensors with symbolic sizes, for tests that need no model around them."""

from typing import Any

import torch

from dlinfer.graph import torch_seam


def symbolic(*values: Any) -> list[Any]:
    """A fake for each tensor, every size a symbol (equal sizes one symbol), and a symbolic number for each int."""
    mode = torch_seam.fresh_mode()
    return [
        mode.from_tensor(value)
        if isinstance(value, torch.Tensor)
        else mode.from_tensor(torch.empty(value)).shape[0]
        for value in values
    ]
