"""The bits of integers that an engine keeps, and intervals of integers."""

from dataclasses import dataclass

import torch
from torch import Tensor

Interval = tuple[int, int]
"""The smallest and the largest integer."""


@dataclass(frozen=True)
class Kept:
    """An engine's limits for integers.

    engine: its name, for messages.
    bits: how many bits it keeps of wider dtypes; narrower dtypes wrap around as in torch.
    cast: the largest float that may be cast to an integer. The engine itself must detect larger floats and NaN."""

    engine: str
    bits: int
    cast: int

    @property
    def limits(self) -> Interval:
        """The smallest and largest integer that the engine keeps."""
        return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1

    def holds(self, x: tuple[float, float]) -> bool:
        """Return whether an interval is within the limits."""
        low, high = self.limits
        return x[0] >= low and x[1] <= high

    def cuts(self, dtype: torch.dtype) -> bool:
        """Return whether the engine keeps fewer bits than torch's dtype has."""
        return dtype is not torch.bool and torch.iinfo(dtype).bits > self.bits

    def limits_of(self, dtype: torch.dtype) -> Interval:
        """Return the interval of the integers or bools that a tensor of this dtype can have in the engine."""
        if dtype is torch.bool:
            return 0, 1
        info = torch.iinfo(dtype)
        return self.limits if self.cuts(dtype) else (info.min, info.max)

    def reason(self, name: str) -> str:
        """Return a reason to refuse a call of the op ``name``: its integers may leave the limits."""
        return f"{name} may return integers of more than {self.bits} bits, which {self.engine} does not keep"


def range_of(tensor: Tensor) -> Interval:
    """Return the interval of a tensor's integers or bools; (0, 0) if it has no elements."""
    if not tensor.numel():
        return 0, 0
    if tensor.dtype is torch.bool:
        return 0, 1
    low, high = torch.aminmax(tensor)
    return int(low), int(high)
