"""The tensors that attention in C++ does not read."""

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def misfit(q: Tensor, caches: dict[str, Tensor]) -> str | None:
    """Why the kernels in C++ do not read these; None where they do.

    Pages may lie in any order, but not the elements of a head.
    """
    if q.dtype not in _DTYPES:
        return f"the C++ kernel computes {', '.join(_name(dtype) for dtype in _DTYPES)}, not {_name(q.dtype)}"
    for name, cache in caches.items():
        if not is_dense(cache):
            return f"the C++ kernel reads heads whose elements are neighbours in memory; in {name} they are apart"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_dense(x: Tensor) -> bool:
    """Whether neighbours along the last dimension are neighbours in memory."""
    return x.shape[-1] <= 1 or x.stride(-1) == 1
