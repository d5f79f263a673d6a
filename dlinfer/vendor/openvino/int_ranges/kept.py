"""How many bits of a whole number an engine keeps, and the intervals that whole numbers lie in."""

from dataclasses import dataclass

import torch
from torch import Tensor

Interval = tuple[int, int]
"""(smallest, largest)."""


@dataclass(frozen=True)
class Kept:
    """What an engine keeps of whole numbers.

    engine: its name in reasons. bits: of numbers whose dtype has more; those of other dtypes wrap around as in torch.
    cast: the largest float that a whole number is made of; the engine itself has to look for larger ones and NaN.
    """

    engine: str
    bits: int
    cast: int

    @property
    def limits(self) -> Interval:
        """What it keeps."""
        return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1

    def holds(self, x: tuple[float, float]) -> bool:
        """Whether it keeps all of an interval."""
        low, high = self.limits
        return x[0] >= low and x[1] <= high

    def cuts(self, dtype: torch.dtype) -> bool:
        """Whether it keeps fewer bits than torch's dtype of whole numbers or bools has."""
        return dtype is not torch.bool and torch.iinfo(dtype).bits > self.bits

    def limits_of(self, dtype: torch.dtype) -> Interval:
        """What a tensor of whole numbers or bools may hold in the engine."""
        if dtype is torch.bool:
            return 0, 1
        info = torch.iinfo(dtype)
        return self.limits if self.cuts(dtype) else (info.min, info.max)

    def reason(self, name: str) -> str:
        """Why a call is not the engine's, in which an op of this name leaves the limits."""
        return f"{name} may give whole numbers beyond {self.bits} bits, which {self.engine} does not keep"


def range_of(tensor: Tensor) -> Interval:
    """The interval of a tensor's whole numbers or bools; zeros where it has none."""
    if not tensor.numel():
        return 0, 0
    if tensor.dtype is torch.bool:
        return 0, 1
    low, high = torch.aminmax(tensor)
    return int(low), int(high)
