"""Samples of ops by name, for tests that take all of an op's in their order, on devices of vendors."""

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest
import torch

from dlinfer.ops import OpSpec, registry
from dlinfer.ops.samples import Sample, SampleMaker
from dlinfer.vendor.base import KVCacheLayout
from tests.ops import cases


class InTurn:
    """Makes samples anew on a device, each once where they are asked for in their order.

    A sample's numbers depend on the samples before it, so that one that is asked for out of turn costs all of those.
    """

    def __init__(self, device: str, layout: KVCacheLayout) -> None:
        self._device, self._layout = device, layout
        self._key: tuple[str, torch.dtype] | None = None
        self._left: Iterator[Sample] = iter(())

    def arguments(self, op: OpSpec, name: str, dtype: torch.dtype) -> tuple[Any, ...]:
        """The arguments of the op's sample of that name."""
        if self._key == (op.name, dtype):
            for sample in self._left:
                if sample.name == name:
                    return sample.args
        self._key = op.name, dtype
        self._left = iter(op.sample_inputs(SampleMaker(dtype, device=self._device, layout=self._layout)))
        return next(sample.args for sample in self._left if sample.name == name)


def names(layout: KVCacheLayout, dtypes: Iterable[torch.dtype], kernels: Collection[str]) -> Iterator[Any]:
    """One pytest parameter (op, sample name, dtype) for each sample of the ops that a vendor has kernels for.

    Of an op without a kernel one: all of its samples would ask the reference.
    """
    for dtype in dtypes:
        for op in registry().values():
            made = op.sample_inputs(SampleMaker(dtype, layout=layout))
            for sample in made if op.name in kernels else itertools.islice(made, 1):
                yield pytest.param(op, sample.name, dtype, id=f"{op.name}-{cases.short(dtype)}-{sample.name}")
