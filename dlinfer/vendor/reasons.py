"""Helpers for kernels' refusal rules: arguments by name, and reasons that many kernels share."""

import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from dlinfer.vendor.base import Kernel, refuses


def where(rule: Callable[[Any], str | None]) -> Callable[[Kernel], Kernel]:
    """Attach a rule that reads the kernel's arguments as attributes: ``where(lambda call: ... call.q ...)``."""

    def with_rule(kernel: Kernel) -> Kernel:
        names = tuple(inspect.signature(kernel).parameters)

        def asked(*args: Any, **kwargs: Any) -> str | None:
            return rule(SimpleNamespace(**dict(zip(names, args, strict=False)), **kwargs))

        asked.__module__, asked.__qualname__ = rule.__module__, rule.__qualname__  # for KernelRuleError
        return refuses(asked)(kernel)

    return with_rule


def first(reasons: Iterable[str | None]) -> str | None:
    """Return the first entry that is a reason; None if all entries are None."""
    return next((reason for reason in reasons if reason), None)


def dtype(actual: torch.dtype, served: Iterable[torch.dtype]) -> str | None:
    """Return a reason to refuse a dtype that is not in ``served``; else None."""
    served = tuple(served)
    return None if actual in served else f"{', '.join(map(_name, served))} are supported, not {_name(actual)}"


def eight_bits(actual: torch.dtype) -> str | None:
    """Return a reason to refuse an 8-bit dtype other than int8; None for int8."""
    return None if actual is torch.int8 else f"torch.int8 is supported, not {actual}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
