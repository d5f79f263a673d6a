"""One case of a self-test, and its result."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

State = Literal["passed", "failed", "error", "not run"]


class NotSupportedError(Exception):
    """The engine or this machine does not support the case, so there is nothing to compare. The text says why."""


@dataclass(frozen=True)
class Case:
    """A computation whose result is known.

    name: for people: "x > y with NaN and infinities".
    covers: the ops that are not used if the case fails: names as ``packet_name`` returns them, or names of the vendor's
        own, which it passes to ``SelfTest.failure``.
    precision: the floating dtype of the computation: "float32", "bfloat16", "float16".
    run: computes. Raises NotSupportedError where this machine or engine does not support it. After any other error the
        covered ops are not used in this process.
    expected: computes the expected result in another way.
    tolerance: absolute and relative tolerance. Integers and bools must be equal.
    skip_reason: why the case cannot run in this process now; None where it can.
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
    """The result of a case. ``reason`` says what differs, what failed or why it did not run; empty if it passed.

    failed: it computed something else. error: it raised an error that may go away: Ctrl-C, a full disk, no compiler.
    """

    name: str
    precision: str
    covers: tuple[str, ...]
    state: State
    reason: str = ""


def packet_name(target: object) -> str:
    """The name of an op without its overload: ``aten.gt`` for ``aten.gt.Scalar``."""
    schema = getattr(target, "_schema", None)
    return str(target) if schema is None else schema.name.replace("::", ".")


def precision_of(values: Sequence[object]) -> str:
    """The precision that tensors are computed in: 16 bits where one of them has 16, else float32."""
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in dtypes:
            return dtype_name(dtype)
    return "float32"


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
