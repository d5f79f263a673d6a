"""The ops' samples as test parameters, and how results are compared."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer.ops import OpSpec, Tolerance, registry
from dlinfer.ops.core.oracle import expected, results, widened
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.utils.closeness import difference, steps
from dlinfer.vendor import discovery
from dlinfer.vendor.base import KVCacheLayout

__all__ = [
    "DTYPES",
    "Tensor",
    "assert_close",
    "expected",
    "first_names",
    "names",
    "results",
    "sample",
    "samples",
    "short",
    "steps",
    "widened",
]


def assert_close(got: list[Tensor], want: list[Tensor], within: Tolerance) -> None:
    """Results are those of the oracle, which are in float64; 8-bit codes may be neighbours."""
    wrong = difference(got, want, rtol=within.rtol, atol=within.atol, expected_is_wide=True, code_steps=1)
    assert wrong is None, wrong


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def samples(op: OpSpec, dtype: torch.dtype, aliased: bool | None = None) -> list[Sample]:
    """The op's samples in the active vendor's cache layout; ``aliased`` picks some."""
    vendor = discovery.activate_default("cpu")
    assert vendor is not None
    made = op.sample_inputs(SampleMaker(dtype, layout=vendor.kv_cache_layout))
    return [sample for sample in made if aliased is None or sample.aliased is aliased]


def names(aliased: bool | None = None) -> list[Any]:
    """One pytest parameter (op name, sample name) for each sample."""
    return [
        pytest.param(op.name, sample.name, id=f"{op.name}-{sample.name}")
        for op in registry().values()
        for sample in samples(op, torch.float32, aliased)
    ]


def first_names() -> set[tuple[str, str]]:
    """(op name, sample name) of one sample of each op."""
    return {(op.name, samples(op, torch.float32, aliased=False)[0].name) for op in registry().values()}


def sample(op: str, name: str, dtype: torch.dtype) -> Sample:
    """A fresh copy of one sample: strides, and which arguments share memory, are the sample's."""
    vendor = discovery.activate_default("cpu")
    assert vendor is not None
    return copy.deepcopy(_by_name(op, dtype, vendor.kv_cache_layout)[name])


@functools.lru_cache(maxsize=6)
def _by_name(op: str, dtype: torch.dtype, layout: KVCacheLayout) -> dict[str, Sample]:
    made = registry()[op].sample_inputs(SampleMaker(dtype, layout=layout))
    return {one.name: one for one in made}
