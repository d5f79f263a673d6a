"""One known answer, and how far what was computed is from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


class NotTakenError(Exception):
    """The engine does not take what it is asked here, so there is nothing to judge. The text says why."""


@dataclass(frozen=True)
class KnownAnswer:
    """Something to compute whose result is known.

    name: what is asked, for people: "x > y with NaN and infinities".
    decides: what is not trusted where the answer is wrong: kinds of ops as ``kind_of`` names them, or a part of the
        vendor's own that it asks for by name.
    precision: the floating dtype that it is computed in: "float32", "bfloat16", "float16".
    run: computes. Raises NotTakenError where this machine or engine does not take it; after another error it is not
        trusted in this process.
    expected: the right answer, worked out another way than ``run`` does it.
    tolerance: absolute and relative distance that rounding explains; whole numbers and bools are always exact.
    unfit: why it cannot be asked as things are in this process; None where it can.
    """

    name: str
    decides: frozenset[str]
    precision: str
    run: Callable[[], Sequence[Tensor]]
    expected: Callable[[], Sequence[Tensor]]
    tolerance: float = 0.0
    unfit: Callable[[], str | None] = lambda: None


@dataclass(frozen=True)
class Verdict:
    """What came of a known answer. ``reason`` says what is wrong or failed, or why it was not asked; empty if right.

    A ``failed`` one raised an error, which may pass: an interruption, a full disk, a compiler that is missing.
    """

    name: str
    precision: str
    decides: tuple[str, ...]
    state: Literal["right", "wrong", "failed", "not asked"]
    reason: str = ""


def kind_of(target: Any) -> str:
    """A kind of op without its overload: ``aten.gt`` for ``aten.gt.Scalar``."""
    schema = getattr(target, "_schema", None)
    return str(target) if schema is None else schema.name.replace("::", ".")


def precision_of(values: Sequence[Any]) -> str:
    """The precision that tensors are computed in: 16 bits where one of them has 16, else float32."""
    found = {value.dtype for value in values if isinstance(value, Tensor)}
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in found:
            return name_of(dtype)
    return "float32"


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def what_is_wrong(given: Sequence[Tensor], right: Sequence[Tensor], tolerance: float) -> str | None:
    """How results differ from the right ones, with the first element that does; None where they do not."""
    if len(given) != len(right):
        return f"it gives {len(given)} results and not {len(right)}"
    for one, other in zip(given, right, strict=True):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"it gives {_described(one)} and not {_described(other)}"
        wrong = ~_close(one, other, tolerance)
        if wrong.any():
            first = wrong.flatten().nonzero()[0]
            got, want = (_number(value.flatten()[first]) for value in (one, other))
            return f"{int(wrong.sum())} of {other.numel()} elements are wrong, the first {got} and not {want}"
    return None


def _described(tensor: Tensor) -> str:
    return f"{name_of(tensor.dtype)}{list(tensor.shape)}"


def _number(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.is_floating_point() else str(value.item())


def _close(one: Tensor, other: Tensor, tolerance: float) -> Tensor:
    """Element by element; NaN is like NaN. In float64, so that the comparison does not round."""
    if not other.is_floating_point():
        return one == other
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    finite = one.isfinite() & other.isfinite()
    return same | finite & ((one - other).abs() <= tolerance * (1 + other.abs()))
