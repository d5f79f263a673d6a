"""The fallback policy: what happens when the active vendor has no native kernel for a call.

allow runs the reference, warn also says so once for each reason, error refuses. Every case is counted, so
that no slow path is taken in silence; ``counts()`` is what reports and tests read.
"""

import sys
import threading
import warnings
from collections import Counter
from dataclasses import dataclass

import torch

from dlinfer import settings
from dlinfer.errors import FallbackError


class FallbackWarning(UserWarning):
    """A call took the reference instead of a vendor's kernel; the policy is ``warn``."""


@dataclass(frozen=True)
class Fallback:
    """One kind of fallback: which op, on which vendor, and why."""

    op: str
    vendor: str
    reason: str


_lock = threading.Lock()
_counts: Counter[Fallback] = Counter()


def counts() -> dict[Fallback, int]:
    """How often each kind of fallback was taken in this process."""
    with _lock:
        return dict(_counts)


def reset() -> None:
    """Forget all counts; each reason is warned of once more."""
    with _lock:
        _counts.clear()


def take(op: str, vendor: str, reason: str, args: tuple[object, ...]) -> None:
    """Apply the policy to a call that is about to run on the reference. Raises FallbackError."""
    policy = settings.current().fallback
    kind = Fallback(op, vendor, reason)
    if policy == "error":
        raise FallbackError(op=op, vendor=vendor, reason=reason, call=describe(args), caller=caller())
    with _lock:
        _counts[kind] += 1
        first = _counts[kind] == 1
    if first and policy == "warn":
        text = (
            f"dlinfer.ops.{op} runs on the slow reference: vendor {vendor!r} has no native kernel for this "
            f"call ({reason}). Call: {describe(args)}, from {caller()}. Said once; DLINFER_FALLBACK=error "
            "refuses instead."
        )
        warnings.warn(text, FallbackWarning, stacklevel=2)


def describe(args: tuple[object, ...]) -> str:
    """Dtypes and shapes of a call's arguments, for messages."""
    return ", ".join(_describe_one(arg) for arg in args)


def _describe_one(arg: object) -> str:
    if isinstance(arg, torch.Tensor):
        return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"
    return repr(arg)


def caller() -> str:
    """The line outside dlinfer and torch that made the call: the model's line."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".", 1)[0] not in ("dlinfer", "torch"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
