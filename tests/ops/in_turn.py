"""Samples of ops by name, for tests that take all of an op's in their order, on devices of vendors."""

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest
import torch

from dlinfer.ops import OpSpec, registry
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.core.samples_in_turn import SamplesInTurn
from dlinfer.vendor.base import KVCacheLayout
from tests.ops import cases


class InTurn:
    """Makes samples anew on a device."""

    def __init__(self, device: str, layout: KVCacheLayout) -> None:
        self._device, self._layout = device, layout
        self._samples = SamplesInTurn()

    def arguments(self, op: OpSpec, name: str, dtype: torch.dtype) -> tuple[Any, ...]:
        """The arguments of the op's sample of that name."""
        make = SampleMaker(dtype, device=self._device, layout=self._layout)
        return self._samples.arguments(op, make, name)


def names(layout: KVCacheLayout, dtypes: Iterable[torch.dtype], kernels: Collection[str]) -> Iterator[Any]:
    """One pytest parameter (op, sample name, dtype) for each sample of the ops that a vendor has kernels for.

    Of an op without a kernel one: all of its samples would ask the reference.
    """
    for dtype in dtypes:
        for op in registry().values():
            made = op.sample_inputs(SampleMaker(dtype, layout=layout))
            for sample in made if op.name in kernels else itertools.islice(made, 1):
                yield pytest.param(op, sample.name, dtype, id=f"{op.name}-{cases.short(dtype)}-{sample.name}")
