"""Functions of eight whole numbers whose results, or what they are made of, may need more bits than these."""

from typing import Any

import torch

GROWING: dict[str, Any] = {
    "add": lambda x: x + x,
    "add with alpha": lambda x: torch.add(x, x, alpha=2),
    "sub": lambda x: x - (0 - x),
    "mul": lambda x: x * x,
    "mul by a number": lambda x: x * 3,
    "square": lambda x: x**2,
    "sum": lambda x: x.sum(),
    "sum of int32": lambda x: x.int().sum(),
    "sum over a dimension": lambda x: x.view(4, 2).sum(1),
    "cumsum": lambda x: x.cumsum(0),
    "hash": lambda x: (x * 31 + 7) % 1000,
    "scatter_add": lambda x: x.scatter_add(0, torch.zeros_like(x), x),
    "index_add": lambda x: x.index_add(0, torch.zeros_like(x), x),
    "index_put": lambda x: x.index_put((torch.zeros_like(x),), x, accumulate=True),
    "diff": lambda x: torch.stack([x, 0 - x], 1).diff(dim=1),
    "through views": lambda x: torch.cat([x.view(2, 4).t(), x.view(4, 2)]).flip(0).sum(),
    "by sizes": lambda x: x * x.shape[0],
}


def everything(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What intervals follow from, in one graph."""
    y = torch.where(x > 0, x, -x)
    return x * 5 - y, x.cumsum(0), (x & 1023) * y, x.clamp(-100, 100) * 7, y.amax() + x, x // 3 + x % 7


def positions(mask: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What language models make of a mask and token ids: positions, buckets of distances, ids times a length."""
    where = mask.cumsum(1) * mask
    near = (where[:, None] - where[:, :, None]).abs().clamp(max=127)
    return where, near, ids * ids.shape[1] + where, (ids % 97) * 1024
