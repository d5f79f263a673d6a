"""Sample inputs that opcheck, the kernel tests and the conformance kit pass to an op."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.base import KVCacheLayout


@dataclass(frozen=True)
class Sample:
    """One call of a torch op.

    name: what is special about the sample, for test ids. args: positional arguments in the schema's order.
    aliased: an output shares memory with an input. opcheck copies each argument, so it can't test such samples.
    """

    name: str
    args: tuple[Any, ...]
    aliased: bool = False


@dataclass
class SampleMaker:
    """Makes reproducible random tensors of one dtype on one device. layout: the vendor's KV cache layout."""

    dtype: torch.dtype
    device: str = "cpu"
    layout: KVCacheLayout = field(default_factory=KVCacheLayout)
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def tensor(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed values times ``scale``."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return values.to(self.dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return uniform integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype).to(self.device)

    def permutation(self, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return 0..count-1 in random order."""
        return torch.randperm(count, generator=self.generator).to(dtype).to(self.device)

    def cache(self, blocks: int, block_size: int, kv_heads: int, head_size: int) -> Tensor:
        """Return a filled KV cache in the vendor's layout; its elements are the same in every layout."""
        values = self.tensor(blocks, block_size, kv_heads, head_size)
        if self.layout.order == "BSHD":
            return values
        return values.permute(*("BSHD".index(dim) for dim in self.layout.order)).contiguous()
