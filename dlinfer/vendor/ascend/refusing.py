"""Reasons why a kernel does not take a call, each said once; a rule strings some of them together."""

import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.ascend import chips
from dlinfer.vendor.base import Kernel, refuses

HALVES = (torch.float16, torch.bfloat16)
LONGEST = 65535
"""Of a product's inner and outer size (npu_quant_matmul, npu_weight_quant_batchmatmul, npu_grouped_matmul)."""


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


def floating(x: Tensor, of: tuple[torch.dtype, ...] | None = None) -> str | None:
    """A dtype that this card computes in, and of those that an op takes."""
    fitting = [one for one in chips.current().floats if of is None or one in of]
    return None if x.dtype in fitting else f"{_names(fitting)} are served, not {_name(x.dtype)}"


def eight_bits(dtype: torch.dtype) -> str | None:
    """int8, of the two that the ops know."""
    return None if dtype is torch.int8 else f"torch.int8 is served, not {dtype}"


def lacking(has: bool, ops: str) -> str | None:
    """This card has the vendor's ops."""
    return None if has else f"{chips.current().name} has no {ops}"


def sizes(*given: int) -> str | None:
    """Sizes of a product."""
    longest = max(given)
    return None if longest <= LONGEST else f"sizes up to {LONGEST} are served, not {longest}"


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(map(_name, dtypes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
