"""Check whether the C++ attention kernels can read a call's tensors as they are."""

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def misfit(q: Tensor, caches: dict[str, Tensor]) -> str | None:
    """Return a reason why the C++ attention kernels cannot read q or a cache; None if they can.

    caches: argument name -> cache. The elements of a head must be contiguous; blocks may lie anywhere.
    """
    if q.dtype not in _DTYPES:
        return f"the C++ kernel supports {', '.join(_name(dtype) for dtype in _DTYPES)}, not {_name(q.dtype)}"
    for name, cache in caches.items():
        if not is_dense(cache):
            return f"the C++ kernel needs contiguous heads, but the heads of {name} are not contiguous"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_dense(x: Tensor) -> bool:
    """Return whether neighbours along the last dimension are neighbours in memory."""
    return x.shape[-1] <= 1 or x.stride(-1) == 1
