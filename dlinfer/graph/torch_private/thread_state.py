"""Autocast and grad mode of the thread that calls a compiled graph."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

_T = TypeVar("_T")

is_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any kind of device."""


def run_plain(function: Callable[..., _T], arguments: Iterable[object]) -> _T:
    """Call ``function(*arguments)`` with autocast off and without recording gradients, and return its result.

    AOTAutograd does the same. The caller's settings hold again afterwards.
    """
    recorded = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        if not is_autocast_enabled():
            return function(*arguments)
        with torch._C._DisableAutocast():
            return function(*arguments)
    finally:
        torch._C._set_grad_enabled(recorded)
