"""The C++ kernels for eager calls. A kernel is used if it can be built here and passes its self-test on this CPU."""

from collections.abc import Callable
from typing import Any

import torch

from dlinfer import settings
from dlinfer.errors import FallbackError
from dlinfer.ops.core import fallback
from dlinfer.vendor.cpu import native

_reasons: dict[tuple[str, torch.dtype], str] = {}  # reason not to use a kernel, or ""
_kernels: dict[str, Callable[..., Any]] = {}


def compiled(
    name: str, *tensors: torch.Tensor, dtype: torch.dtype | None = None
) -> Callable[..., Any] | None:
    """Return the C++ kernel ``name`` for tensors of one dtype, or None if torch's kernel has to serve the call.

    tensors: tensors of the call, for messages; the first one's dtype selects the self-test.
    dtype: selects the self-test instead, for a call whose first tensor has 8-bit numbers.

    The first call of a dtype builds the library, if it is not there yet, and runs the kernel's self-test. Each None
    counts as a fallback. Raises FallbackError instead if the fallback policy is ``error``."""
    key = (name, dtype or tensors[0].dtype)
    reason = _reasons.get(key)
    if reason is None:
        reason = _reason(*key)
    if not reason:
        return _kernels[name]
    fall_back(name, reason, tensors)
    return None


def _reason(name: str, dtype: torch.dtype) -> str:
    """Return why a kernel is not used, or "" if it is. Cached, except inside a self-test, which may use any kernel."""
    missing = native.why_not()
    if missing is not None:
        return _reasons.setdefault((name, dtype), f"the C++ kernels cannot be built: {missing}")
    # This import takes a third of a second, which callers without a compiler need not spend.
    from dlinfer.graph.selftest.case import dtype_name
    from dlinfer.graph.selftest.suite import is_running
    from dlinfer.vendor.cpu.selftest.kernels import KERNEL_SELFTEST

    _kernels[name] = getattr(torch.ops.dlinfer_cpu, name).default
    if is_running():
        return ""
    return _reasons.setdefault(
        (name, dtype), KERNEL_SELFTEST.failure(f"native {name}", dtype_name(dtype)) or ""
    )


def fall_back(name: str, reason: str, tensors: tuple[torch.Tensor, ...]) -> None:
    """Count a call that torch's kernels are about to serve. Raises FallbackError if the policy forbids fallbacks."""
    call = fallback.describe(tensors)

    def refusal() -> FallbackError:
        return FallbackError(op=name, vendor="cpu", reason=reason, call=call, caller=fallback.caller())

    fallback.settle(
        fallback.Fallback(name, "cpu", reason),
        settings.current().fallback,
        refusal,
        lambda: (
            f"dlinfer.ops.{name} runs on torch's kernels, which are slower: {reason}. Call: {call}. This warning "
            "appears once; DLINFER_FALLBACK=error raises an error instead."
        ),
    )
