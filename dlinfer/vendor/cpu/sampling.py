"""Choose the next tokens from logits on CPU, in C++ (csrc/sampling), without sorting a vocabulary."""

import torch
from torch import Tensor

from dlinfer.ops.core.checks import FLOATS
from dlinfer.vendor.cpu.compiled import compiled, fall_back
from dlinfer.vendor.device import Sampler


class CpuSampler(Sampler):
    """Chooses tokens by the C++ kernels. Of equal logits the lower token comes first. Draws are computed in float32."""

    def largest(self, logits: Tensor) -> Tensor | None:
        kernel = compiled("largest_tokens", logits) if _taken("largest_tokens", logits) else None
        return None if kernel is None else kernel(logits)

    def draw(
        self,
        logits: Tensor,
        numbers: Tensor,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
    ) -> Tensor | None:
        kernel = compiled("drawn_tokens", logits) if _taken("drawn_tokens", logits) else None
        if kernel is None:
            return None
        return kernel(
            logits, numbers.float(), _as(torch.int64, top_k), *(_as(torch.float32, p) for p in (top_p, min_p))
        )


def _as(dtype: torch.dtype, limits: Tensor | None) -> Tensor | None:
    return None if limits is None else limits.to(dtype)


def _taken(name: str, logits: Tensor) -> bool:
    """Return whether the kernel ``name`` takes logits of this dtype and shape.

    If not, counts a fallback, or raises FallbackError if the fallback policy is ``error``.
    """
    if logits.dtype not in FLOATS:
        reason = f"the logits have dtype {str(logits.dtype).removeprefix('torch.')}"
    elif logits.dim() != 2 or logits.shape[1] == 0:
        reason = f"the logits have shape {list(logits.shape)}"
    else:
        return True
    fall_back(name, reason, (logits,))
    return False
