"""A case: one call of an op with one sample, in one dtype, on the device of the vendor under test."""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer.conformance import borders
from dlinfer.errors import FallbackError, GraphFallbackError
from dlinfer.ops.core import oracle
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.core.samples_in_turn import SamplesInTurn
from dlinfer.ops.core.spec import OpSpec
from dlinfer.vendor.base import HOST, KVCacheLayout, Vendor

CACHES = ("k_cache", "v_cache", "k_scales_zeros", "v_scales_zeros")
"""The names of the arguments that are caches. Caches have the vendor's cache layout, and ops write to them."""

DECLINES = (FallbackError, GraphFallbackError)
"""The errors that a call raises under the fallback policy ``error`` if a kernel or an engine declines the call."""

_samples = SamplesInTurn()


class Failed(Exception):
    """Raised by a check that found a fault. The error's text describes the fault."""


class Skipped(Exception):
    """Raised by a check that does not apply to a case. The error's text says why."""


@dataclass(frozen=True)
class Subject:
    """The vendor under test, which is the active vendor. device: the type of the device that holds the samples."""

    vendor: Vendor
    device: str

    @property
    def on_host(self) -> bool:
        """Whether the vendor's tensors are in host memory."""
        return self.device == HOST

    def check_device(self, results: Iterable[Tensor]) -> None:
        """Raise Failed for a result on another device than the vendor's."""
        for number, result in enumerate(results):
            if result.device.type != self.device:
                raise Failed(f"result {number} is on {result.device}, not on {self.device}")

    def maker(self, dtype: torch.dtype, *, on_host: bool = False, seed: int = 0) -> SampleMaker:
        """Return a maker of samples on the vendor's device or, if ``on_host``, on the host for the reference.

        Both makers return the same numbers.
        """
        layout = self.vendor.kv_cache_layout
        if on_host and not self.on_host:
            layout = KVCacheLayout(block_size=layout.block_size)
        return SampleMaker(dtype, HOST if on_host else self.device, layout, seed)


@dataclass(frozen=True)
class Case:
    """One sample of an op in one dtype.

    aliased: arguments share memory. border: the sample comes from the module ``borders``. seed: the seed of the
    sample's random numbers.
    """

    subject: Subject
    op: OpSpec
    dtype: torch.dtype
    sample: str
    aliased: bool = False
    border: bool = False
    seed: int = 0

    def fresh(self) -> list[Any]:
        return self._made(self.subject.maker(self.dtype, seed=self.seed))

    def _made(self, make: SampleMaker) -> list[Any]:
        if self.border:
            return list(borders.arguments(self.op.name, self.sample, make))
        return list(_samples.arguments(self.op, make, self.sample))

    def expected(self, args: list[Any] | None = None) -> list[Tensor]:
        """Return the reference's results, on the host.

        args: the arguments, on the host; None for the case's own arguments.
        """
        if args is None:
            args = self.for_oracle()
        return oracle.expected(self.op, args)

    def for_oracle(self) -> list[Any]:
        """Return the call's arguments for the reference, on the host.

        If the vendor's device is not the host, this copies the arguments from the device: the device may round a
        sample's numbers differently.
        """
        if self.subject.on_host:
            return self._made(self.subject.maker(self.dtype, on_host=True, seed=self.seed))
        layout = self.subject.vendor.kv_cache_layout

        def shown(name: str, tensor: Tensor) -> Tensor:
            host = tensor.cpu()
            return layout.canonical(host) if name in CACHES and host.dim() == 4 else host

        return [
            mapped(partial(shown, name), arg)
            for name, arg in zip(self.op.parameters, self.fresh(), strict=False)
        ]

    def call(self, args: list[Any]) -> Any:
        return self.op.overload(*args)

    def results(self, args: list[Any], returned: Any) -> list[Tensor]:
        """Return the results of a call, moved to the host. Caches among them get the reference's layout.

        args: the call's arguments, after the call. returned: the value that the call returned.
        """
        outputs = [output.cpu() for output in oracle.results(self.op, args, returned)]
        if self.subject.on_host:
            return outputs
        layout = self.subject.vendor.kv_cache_layout
        fresh = len(outputs) - len(self.op.mutates)
        for place, name in enumerate(self.op.mutates, fresh):
            if name in CACHES and outputs[place].dim() == 4:
                outputs[place] = layout.canonical(outputs[place])
        return outputs

    def compare(self, args: list[Any], returned: Any, want: list[Tensor]) -> None:
        wrong = oracle.difference(self.op, self.dtype, self.results(args, returned), want)
        if wrong is not None:
            raise Failed(wrong)

    def named(self, args: list[Any]) -> Iterator[tuple[str, Tensor]]:
        for name, arg in zip(self.op.parameters, args, strict=False):
            for leaf in pytree.tree_leaves(arg):
                if isinstance(leaf, Tensor):
                    yield name, leaf


def mapped(function: Any, value: Any) -> Any:
    """Return ``value`` with each tensor replaced by ``function(tensor)``, also in lists and tuples.

    A tuple becomes a list.
    """
    if isinstance(value, list | tuple):
        return [mapped(function, item) for item in value]
    return function(value) if isinstance(value, Tensor) else value


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's bits as integers on the host. In this form, NaN equals NaN."""
    host = tensor.detach().cpu().contiguous().clone()
    return host if host.dtype is torch.bool else host.view(_BITS[host.itemsize])


def poison(dtype: torch.dtype) -> float | int | bool:
    """Return a value for memory that no kernel may read: NaN, or an integer far out of every valid range."""
    if dtype is torch.bool:
        return True
    if dtype.is_floating_point:
        return float("nan")
    return 2**30 if dtype.itemsize >= 4 else torch.iinfo(dtype).max


def dirty_memory(like: list[Tensor]) -> None:
    """Fill memory with NaN and free it, because an allocator reuses freed memory without clearing it.

    A result that a kernel forgets to write is then NaN, not a zero that is right by luck. like: tensors of the results'
    sizes.
    """
    held = [
        torch.full(tensor.shape, poison(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
        for tensor in like
        for _ in range(4)
        if tensor.dtype.itemsize > 1
    ]
    del held
    gc.collect(0)
