"""The fallback policy: what happens if a vendor's kernel or graph engine refuses a call or a graph.

``allow`` runs a slower way, ``warn`` also warns once for each reason, ``error`` raises. Every fallback is counted, so
that no slow path goes unnoticed. Reports and tests read ``counts()``. Calls of ops count when they run. Parts of a
compiled graph outside its engine count once, at compile time (``dlinfer/graph/report/policy.py``).
"""

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dlinfer import settings
from dlinfer.errors import DlinferError, FallbackError


class FallbackWarning(UserWarning):
    """A call or part of a graph runs outside its vendor's kernel or graph engine, and the policy is ``warn``."""


@dataclass(frozen=True)
class Fallback:
    """One kind of fallback: an op or a model's function, the vendor or engine that does not run it, and why."""

    op: str
    vendor: str
    reason: str


_lock = threading.Lock()
_counts: Counter[Fallback] = Counter()
_said: set[Fallback] = set()


def counts() -> dict[Fallback, int]:
    """Return how often this process took each kind of fallback."""
    with _lock:
        return dict(_counts)


def reset() -> None:
    """Forget all counts and warnings, so that each reason warns once again."""
    with _lock:
        _counts.clear()
        _said.clear()


def take(op: str, vendor: str, reason: str, args: tuple[object, ...]) -> None:
    """Apply the policy to a call that the op's reference implementation is about to run.

    Raises FallbackError if the policy is ``error``.
    """

    def refusal() -> DlinferError:
        return FallbackError(op=op, vendor=vendor, reason=reason, call=describe(args), caller=caller())

    def text() -> str:
        return (
            f"dlinfer.ops.{op} runs on the slow reference: vendor {vendor!r} has no native kernel for this call "
            f"({reason}). Call: {describe(args)}, from {caller()}. This warning appears once; "
            "DLINFER_FALLBACK=error raises an error instead."
        )

    settle(Fallback(op, vendor, reason), settings.current().fallback, refusal, text)


def settle(kind: Fallback, policy: str, refusal: Callable[[], DlinferError], text: Callable[[], str]) -> None:
    """Raise ``refusal()`` if the policy is ``error``; else count the fallback.

    text: makes the text of the warning. Under ``warn``, each ``kind`` of fallback warns once.
    """
    if policy == "error":
        raise refusal()
    with _lock:
        _counts[kind] += 1
        says = policy == "warn" and kind not in _said
        if says:
            _said.add(kind)
    if says:
        warnings.warn(text(), FallbackWarning, stacklevel=3)


def describe(args: tuple[object, ...]) -> str:
    """Return the dtypes and shapes of a call's arguments as text for messages."""
    return ", ".join(_describe_one(arg) for arg in args)


def _describe_one(arg: object) -> str:
    if isinstance(arg, torch.Tensor):
        return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"
    return repr(arg)


def caller() -> str:
    """Return "FILE:LINE" of the innermost caller outside dlinfer and torch: the model's line."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".", 1)[0] not in ("dlinfer", "torch"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
