"""The fallback policy: what happens where a vendor's kernel or graph engine does not run what it was asked to.

allow runs the slower way, warn also says so once for each reason, error refuses. Every case is counted, so
that no slow path is taken in silence; ``counts()`` is what reports and tests read. Calls of ops are counted as they
run; what a compiled graph leaves outside its engine, once when it is compiled (``dlinfer/graph/report/policy.py``).
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
    """Something runs a slower way than its vendor's kernel or graph engine; the policy is ``warn``."""


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
    """How often each kind of fallback was taken in this process."""
    with _lock:
        return dict(_counts)


def reset() -> None:
    """Forget all counts; each reason is warned of once more."""
    with _lock:
        _counts.clear()
        _said.clear()


def take(op: str, vendor: str, reason: str, args: tuple[object, ...]) -> None:
    """Apply the policy to a call that is about to run on the reference. Raises FallbackError."""

    def refusal() -> DlinferError:
        return FallbackError(op=op, vendor=vendor, reason=reason, call=describe(args), caller=caller())

    def text() -> str:
        return (
            f"dlinfer.ops.{op} runs on the slow reference: vendor {vendor!r} has no native kernel for this "
            f"call ({reason}). Call: {describe(args)}, from {caller()}. Said once; DLINFER_FALLBACK=error "
            "refuses instead."
        )

    settle(Fallback(op, vendor, reason), settings.current().fallback, refusal, text)


def settle(kind: Fallback, policy: str, refusal: Callable[[], DlinferError], text: Callable[[], str]) -> None:
    """Count a fallback that the policy lets pass, and warn of the first of its kind; raise ``refusal()`` if not."""
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
    """Dtypes and shapes of a call's arguments, for messages."""
    return ", ".join(_describe_one(arg) for arg in args)


def _describe_one(arg: object) -> str:
    if isinstance(arg, torch.Tensor):
        return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"
    return repr(arg)


def caller() -> str:
    """The line outside dlinfer and torch that made the call: the model's line."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".", 1)[0] not in ("dlinfer", "torch"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
