"""The reasons why the C++ attention kernels do not read some tensors."""

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def misfit(q: Tensor, caches: dict[str, Tensor]) -> str | None:
    """Return why the C++ kernels do not read these tensors, or None if they do.

    Pages may lie in any order, but the elements of a head must be dense.
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
