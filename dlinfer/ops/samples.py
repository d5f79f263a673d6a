"""Sample inputs: what opcheck, the kernel tests and the conformance kit feed to an op."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlinfer.vendor.base import KVCacheLayout

if TYPE_CHECKING:
    from dlinfer.ops.spec import OpSpec


@dataclass(frozen=True)
class Sample:
    """One call of a torch op.

    name: what is special about it, for test ids.
    args: positional arguments in the schema's order.
    aliased: an output argument shares memory with an input; opcheck separates its arguments, so such samples
        are tested apart from it.
    """

    name: str
    args: tuple[Any, ...]
    aliased: bool = False


@dataclass
class SampleMaker:
    """Makes tensors of one dtype on one device, reproducibly; ``layout`` is the vendor's KV cache layout."""

    dtype: torch.dtype
    device: str = "cpu"
    layout: KVCacheLayout = field(default_factory=KVCacheLayout)
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def tensor(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values times ``scale``."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return values.to(self.dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Uniform integers of [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype).to(self.device)

    def permutation(self, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """A random order of 0..count-1."""
        return torch.randperm(count, generator=self.generator).to(dtype).to(self.device)

    def cache(self, blocks: int, block_size: int, kv_heads: int, head_size: int) -> Tensor:
        """A filled KV cache in the vendor's layout; the numbers are the same in every layout."""
        values = self.tensor(blocks, block_size, kv_heads, head_size)
        if self.layout.order == "BSHD":
            return values
        return values.permute(*("BSHD".index(dim) for dim in self.layout.order)).contiguous()


class SamplesInTurn:
    """Samples of an op by name, made anew at each call, for callers that ask for one after the other.

    A sample's numbers are drawn behind those of the samples before it, so that making one makes all of these. Here an
    iteration goes on where it stands, if no sample that is asked for lies behind it. No two samples share memory that
    the op writes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: tuple[Any, ...] = ()
        self._places: dict[str, int] = {}
        self._begun: dict[int, list[Iterator[Sample]]] = {}  # by the place of the sample that comes next

    def arguments(self, op: "OpSpec", make: SampleMaker, name: str) -> tuple[Any, ...]:
        """The arguments of the op's sample of that name. make: a fresh one; another may have made them."""
        key = (op.name, make.dtype, make.device, make.layout, make.seed)
        with self._lock:
            if key != self._key:
                self._key, self._places, self._begun = key, {}, {}
            wanted = self._places.get(name, len(self._places))
            before = [one for one, waiting in self._begun.items() if waiting and one <= wanted]
            place = max(before, default=0)
            samples = self._begun[place].pop() if before else iter(op.sample_inputs(make))
            for sample in samples:
                self._places.setdefault(sample.name, place)
                place += 1
                if sample.name == name:
                    self._begun.setdefault(place, []).append(samples)
                    return sample.args
        raise KeyError(f"op {op.name!r} has no sample {name!r}")
