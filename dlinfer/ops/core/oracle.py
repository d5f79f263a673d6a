"""The oracle of an op: expected results from its reference in float64, compared within the op's tolerances."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dlinfer.ops.core.spec import OpSpec
from dlinfer.utils import closeness


def widened(value: Any) -> Any:
    """Return a copy of a call's argument, with floating tensors as float64. 8-bit tensors keep their dtype."""
    if isinstance(value, list | tuple):
        return [widened(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, Tensor):
        is_code = value.itemsize == 1  # float8 tensors are codes: their bytes must not change
        return value.double() if value.is_floating_point() and not is_code else value.clone()
    return value


def results(op: OpSpec, args: Sequence[Any], returned: Any) -> list[Tensor]:
    """Return all results of a call: the tensors that the op returned, then the arguments that the op wrote."""
    fresh = [] if returned is None else [returned] if isinstance(returned, Tensor) else list(returned)
    return fresh + [args[op.parameters.index(name)] for name in op.mutates]


def expected(op: OpSpec, args: Sequence[Any]) -> list[Tensor]:
    """Return the expected results of a call, computed by the reference in float64."""
    if op.makes_codes:
        call = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        op.reference(*call)
        outputs = results(op, call, None)
        return [
            output.double() if output.is_floating_point() and output.itemsize > 1 else output
            for output in outputs
        ]
    wide = widened(args)
    return results(op, wide, op.reference(*wide))


def difference(
    op: OpSpec, dtype: torch.dtype, actual: Sequence[Tensor], expected: Sequence[Tensor]
) -> str | None:
    """Describe how a call's results differ from ``expected``; None if they are within the op's tolerance.

    8-bit codes may be one step away, because a value near the middle of two codes may round to the other one in
    float64.
    """
    within = op.tolerances[dtype]
    return closeness.difference(
        actual, expected, rtol=within.rtol, atol=within.atol, expected_is_wide=True, code_steps=1
    )
