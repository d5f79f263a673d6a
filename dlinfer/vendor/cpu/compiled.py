"""Find the C++ kernel for an eager call.

A kernel is used if it can be built here and passes its self-test on this CPU.
"""

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
    """Return the C++ kernel ``name``; None if the kernel cannot be used, so that torch has to compute the call.

    tensors: the call's tensors, which messages describe.
    dtype: the dtype to self-test the kernel with; by default that of the first tensor. Callers pass it if the first
        tensor has 8-bit numbers.

    The first request for a kernel and dtype builds the library, if it is not there yet, and runs the kernel's
    self-test. Each None counts as a fallback. Raises FallbackError instead if the fallback policy is ``error``."""
    key = (name, dtype or tensors[0].dtype)
    reason = _reasons.get(key)
    if reason is None:
        reason = _reason(*key)
    if not reason:
        return _kernels[name]
    fall_back(name, reason, tensors)
    return None


def _reason(name: str, dtype: torch.dtype) -> str:
    """Return a reason not to use the C++ kernel ``name`` with ``dtype``; "" if it may be used.

    The answer is cached, except while a self-test runs: a self-test may use any kernel.
    """
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
    """Count a fallback from the C++ kernel ``name`` to torch. Raises FallbackError if the policy forbids fallbacks.

    reason: why the C++ kernel is not used. tensors: the call's tensors, which messages describe.
    """
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
