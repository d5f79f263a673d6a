"""What a call is to give: the op's reference in float64, and how far from it a result may be."""

from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.spec import OpSpec, Tolerance

IN_ITS_DTYPE = ("fill_quantised_kv_cache",)
"""Ops that make codes of a cache, which are defined for the dtype of the numbers that they are made of."""


def widened(value: Any) -> Any:
    """Arguments apart from each other, with floating tensors in float64; numbers of 8 bits stay what they are."""
    if isinstance(value, list | tuple):
        return [widened(one) for one in value]
    if isinstance(value, Tensor):
        is_code = value.itemsize == 1  # fp8, of which the bytes matter
        return value.double() if value.is_floating_point() and not is_code else value.clone()
    return value


def results(op: OpSpec, args: list[Any] | tuple[Any, ...], returned: Any) -> list[Tensor]:
    """What a call has produced: the tensors it returned and those it wrote."""
    fresh = [] if returned is None else [returned] if isinstance(returned, Tensor) else list(returned)
    return fresh + [args[op.parameters.index(name)] for name in op.mutates]


def expected(op: OpSpec, args: list[Any] | tuple[Any, ...]) -> list[Tensor]:
    """The oracle's results: the reference in float64; where codes are made, in the dtype that they are defined for."""
    if op.name in IN_ITS_DTYPE:
        given = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        op.reference(*given)
        found = results(op, given, None)
        return [one.double() if one.is_floating_point() and one.itemsize > 1 else one for one in found]
    wide = widened(args)
    return results(op, wide, op.reference(*wide))


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: Tolerance) -> None:
    """Equal within a stated tolerance; integers exactly, and NaN only where NaN belongs. Raises AssertionError.

    Quantised numbers may be neighbours: of a value halfway between two, the oracle in float64 may choose the other.
    """
    assert len(got) == len(want), f"{len(got)} results, not {len(want)}"
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.shape == other.shape, (
            f"result {number} has shape {tuple(one.shape)}, not {tuple(other.shape)}"
        )
        if one.element_size() == 1 and one.dtype is not torch.bool:
            assert one.dtype is other.dtype, f"result {number} is {one.dtype}, not {other.dtype}"
            away = (steps(one) - steps(other)).abs()
            assert not torch.any(away > 1), f"result {number}: codes are up to {int(away.max())} steps away"
        elif one.is_floating_point():
            torch.testing.assert_close(
                one.double(), other.double(), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
            )
        else:
            assert torch.equal(one, other), f"result {number}: integers differ"


def steps(numbers: Tensor) -> Tensor:
    """8-bit numbers counted in steps from 0, in int32: neighbours are one apart."""
    if not numbers.is_floating_point():
        return numbers.int()
    bits = numbers.view(torch.int8).int()
    return torch.where(bits < 0, -(bits & 0x7F), bits)
