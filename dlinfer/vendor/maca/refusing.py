"""Reasons why a kernel does not take a call, each said once, and how tensors are laid out for one that does."""

from collections.abc import Iterable

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
_ALIGNED = 16
"""Bytes: mcoplib reads numbers of 16 bits by eight, some kernels without asking where a tensor begins."""


def first(reasons: Iterable[str | None]) -> str | None:
    """The first reason there is."""
    return next((one for one in reasons if one), None)


def floating(x: Tensor, of: tuple[torch.dtype, ...] = FLOATS) -> str | None:
    """A dtype that an op takes."""
    return None if x.dtype in of else f"{', '.join(map(_name, of))} are served, not {_name(x.dtype)}"


def eight_bits(dtype: torch.dtype) -> str | None:
    """int8, of the two that the ops know."""
    return None if dtype is torch.int8 else f"torch.int8 is served, not {dtype}"


def multiples(of: int, **sizes: int) -> str | None:
    """Sizes that have to be multiples of a number."""
    bad = {name: size for name, size in sizes.items() if size % of}
    return f"multiples of {of} are served, not {bad}" if bad else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows(x: Tensor) -> Tensor:
    """x [..., size] as rows [n, size] without gaps that begin where vectors do; a view where it lies so already."""
    found = x.reshape(-1, x.shape[-1]).contiguous()
    return found.clone() if found.data_ptr() % _ALIGNED else found


def copied_rows(x: Tensor) -> Tensor:
    """The same, never x's own memory: for ops that write into their arguments."""
    found = rows(x)
    return found.clone() if found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else found
