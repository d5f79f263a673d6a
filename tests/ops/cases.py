"""The ops' samples as test parameters, and how results are compared."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer.ops import OpSpec, Tolerance, registry
from dlinfer.ops.samples import Sample, SampleMaker
from dlinfer.vendor import discovery

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
    """A fresh copy of one sample."""
    return next(one for one in samples(registry()[op], dtype) if one.name == name)


def widened(args: tuple[Any, ...]) -> list[Any]:
    """Arguments apart from each other, with floating tensors in float64; numbers of 8 bits stay what they are."""
    return [_widened(arg) for arg in copy.copy(args)]


def _widened(arg: Any) -> Any:
    if isinstance(arg, list):
        return [_widened(one) for one in arg]
    if isinstance(arg, Tensor):
        is_code = arg.itemsize == 1  # fp8, of which the bytes matter
        return arg.double() if arg.is_floating_point() and not is_code else arg.clone()
    return arg


def results(op: OpSpec, args: list[Any] | tuple[Any, ...], returned: Any) -> list[Tensor]:
    """What a call has produced: the tensors it returned and those it wrote."""
    fresh = [] if returned is None else [returned] if isinstance(returned, Tensor) else list(returned)
    return fresh + [args[op.parameters.index(name)] for name in op.mutates]


def expected(op: OpSpec, args: tuple[Any, ...]) -> list[Tensor]:
    """The oracle's results: the reference in float64; where codes are made, in the dtype that they are defined for."""
    if op.name == "fill_quantised_kv_cache":
        args = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
        op.reference(*args)
        found = results(op, args, None)
        return [one.double() if one.is_floating_point() and one.itemsize > 1 else one for one in found]
    wide = widened(args)
    return results(op, wide, op.reference(*wide))


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: Tolerance) -> None:
    """Equal within a stated tolerance; integers exactly, and NaN only where NaN belongs.

    Quantised numbers may be neighbours: of a value halfway between two, the oracle in float64 may choose the other.
    """
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        if one.element_size() == 1 and one.dtype is not torch.bool:
            assert one.dtype is other.dtype
            assert one.shape == other.shape
            assert not torch.any((steps(one) - steps(other)).abs() > 1)
        elif one.is_floating_point():
            torch.testing.assert_close(
                one.double(), other.double(), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
            )
        else:
            assert torch.equal(one, other)


def steps(numbers: Tensor) -> Tensor:
    """8-bit numbers counted in steps from 0, in int32: neighbours are one apart."""
    if not numbers.is_floating_point():
        return numbers.int()
    bits = numbers.view(torch.int8).int()
    return torch.where(bits < 0, -(bits & 0x7F), bits)
