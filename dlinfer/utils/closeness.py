"""Compare results with expected results. Samples, conformance, self-tests and export trials use this test."""

from collections.abc import Sequence

import torch
from torch import Tensor


def difference(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    expected_is_wide: bool = False,
    code_steps: int = 0,
) -> str | None:
    """Return a text that says how results differ from the expected results; None if they are close.

    NaN and infinities must be in the expected places. Integers and bools must be equal. The comparison is made in
    float64, so it does not round.

    rtol, atol: floats are close if ``|actual - expected| <= atol + rtol * |expected|``.
    expected_is_wide: expected floats are float64, whatever float dtype the results have.
    code_steps: how many steps apart 8-bit numbers (int8, uint8, float8) may be. Above 0, it replaces the tolerances and
        the equality for 8-bit numbers, because a value halfway between two of them may be rounded to either.
    """
    if len(actual) != len(expected):
        return f"{len(actual)} results, expected {len(expected)}"
    for number, (result, target) in enumerate(zip(actual, expected, strict=True)):
        is_code = code_steps > 0 and result.itemsize == 1 and result.dtype is not torch.bool
        may_widen = expected_is_wide and result.is_floating_point() and not is_code
        if result.shape != target.shape or (result.dtype != target.dtype and not may_widen):
            return f"result {number} is {_described(result)}, expected {_described(target)}"
        if is_code:
            wrong = (steps(result) - steps(target)).abs() > code_steps
        elif result.is_floating_point():
            wide = result.double(), target.double()
            wrong = ~torch.isclose(*wide, rtol=rtol, atol=atol, equal_nan=True)
        else:
            wrong = result != target
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            first = f"the first is {_number(result[place])}, expected {_number(target[place])}"
            return f"{int(wrong.sum())} of {target.numel()} elements of result {number} are wrong; {first}"
    return None


def steps(codes: Tensor) -> Tensor:
    """Return the position of each 8-bit number among all numbers of its dtype, int32.

    Zero has position 0, neighbours differ by 1.
    """
    if not codes.is_floating_point():
        return codes.int()
    bits = codes.view(torch.int8).int()
    return torch.where(bits < 0, -(bits & 0x7F), bits)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _number(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.is_floating_point() else str(value.item())
