"""Fake tensors of symbolic sizes."""

from typing import Any

import torch

from dlinfer.graph.torch_private.fake_mode import strict_mode
from dlinfer.graph.torch_private.symbols import new_symbol


def fakes(*shapes, **ranges):
    """Return (mode, name -> symbol, fake tensors). A shape has numbers and names; ranges: name -> limits."""
    mode = strict_mode()
    symbols: dict[Any, Any] = {
        name: new_symbol(mode, number, *limits) for number, (name, limits) in enumerate(ranges.items())
    }
    with mode:
        return mode, symbols, [torch.empty([symbols.get(size, size) for size in shape]) for shape in shapes]
