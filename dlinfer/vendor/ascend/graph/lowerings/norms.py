"""RMS norms."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Lower to ``RmsNorm``, which takes x of any rank."""
    normalised, _ = torch.ops.npu.npu_rms_norm(x, weight, eps)
    return normalised


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Lower to ``AddRmsNorm``. Return the norm, then the sum of x and residual."""
    normalised, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
    return normalised, total
