"""One case of a self-test, and its result."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

State = Literal["passed", "failed", "error", "not run"]


class NotSupportedError(Exception):
    """The engine or this machine does not support a case, so there is nothing to compare. The error's text says why."""


@dataclass(frozen=True)
class Case:
    """A computation whose result is known.

    name: a description for people, such as "x > y with NaN and infinities".
    covers: names of ops. If the case fails, these ops are not used. A name comes from ``packet_name``,
        or is a name of the vendor's that the vendor also passes to ``SelfTest.failure``.
    precision: the floating dtype of the computation: "float32", "bfloat16" or "float16".
    run: computes the results under test. It raises NotSupportedError if this machine or engine does not support the
        case. After any other error, the covered ops are not used in this process.
    expected: computes the expected results in another way.
    tolerance: absolute and relative tolerance. Integers and bools must be equal.
    skip_reason: returns a reason not to run the case in this process now; None if it can run.
    """

    name: str
    covers: Collection[str]
    precision: str
    run: Callable[[], Sequence[Tensor]]
    expected: Callable[[], Sequence[Tensor]]
    tolerance: float = 0.0
    skip_reason: Callable[[], str | None] = lambda: None


@dataclass(frozen=True)
class Result:
    """The result of a case.

    state: ``passed``, ``failed`` (a wrong result), ``error`` (an error that may go away, such as a full disk), or ``not
        run``.
    reason: the difference, the error, or the reason why the case did not run; empty if the case passed.
    """

    name: str
    precision: str
    covers: tuple[str, ...]
    state: State
    reason: str = ""


def packet_name(target: object) -> str:
    """Return the name of an op without its overload: ``aten.gt`` for ``aten.gt.Scalar``."""
    schema = getattr(target, "_schema", None)
    return str(target) if schema is None else schema.name.replace("::", ".")


def precision_of(values: Sequence[object]) -> str:
    """Return the precision of a computation: "bfloat16" or "float16" if a value has this dtype, else "float32"."""
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in dtypes:
            return dtype_name(dtype)
    return "float32"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
