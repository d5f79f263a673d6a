"""How kernels of device vendors say why they do not take a call: rules by names of arguments, and shared reasons."""

import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from dlinfer.vendor.base import Kernel, refuses


def where(rule: Callable[[Any], str | None]) -> Callable[[Kernel], Kernel]:
    """``refuses`` for a rule that finds the kernel's arguments by name: ``where(lambda call: ... call.q ...)``."""

    def with_rule(kernel: Kernel) -> Kernel:
        names = tuple(inspect.signature(kernel).parameters)

        def asked(*args: Any, **kwargs: Any) -> str | None:
            return rule(SimpleNamespace(**dict(zip(names, args, strict=False)), **kwargs))

        return refuses(asked)(kernel)

    return with_rule


def first(reasons: Iterable[str | None]) -> str | None:
    """The first reason there is."""
    return next((one for one in reasons if one), None)


def dtype(given: torch.dtype, served: Iterable[torch.dtype]) -> str | None:
    """One of some dtypes."""
    served = tuple(served)
    return None if given in served else f"{', '.join(map(_name, served))} are served, not {_name(given)}"


def eight_bits(given: torch.dtype) -> str | None:
    """int8, of the two that the ops know."""
    return None if given is torch.int8 else f"torch.int8 is served, not {given}"


def _name(given: torch.dtype) -> str:
    return str(given).removeprefix("torch.")
