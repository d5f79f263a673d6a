"""The meaning of 8-bit numbers: the rounding and the scales that LMDeploy's checkpoints were made for.

A value is an 8-bit number times a scale. Scales and numbers are computed in float32 for every input dtype, so all
devices compute the same 8-bit numbers. A device that rounds differently would differ by a whole step.
"""

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""8-bit dtype -> the number that stands for a row's largest absolute value."""

LEAST_OF_TOKEN = 1e-7
LEAST_OF_BLOCK = 1e-6
"""Lower bounds of the largest value of a token (``LEAST_OF_TOKEN``) and of a block, as in LMDeploy's kernels.

So a row of zeros has a scale other than 0.
"""


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values rounded to the nearest 8-bit numbers and clamped to the range of ``dtype``.

    Halves are rounded away from zero in int8, as in LMDeploy's kernels (libdevice ``round``), and to even in float8.
    """
    if dtype is torch.int8:
        whole = values.trunc()
        values = whole + ((values - whole).abs() >= 0.5) * values.sign()
        return values.clamp(-128, 127).to(torch.int8)
    return values.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def per_token(x: Tensor, dtype: torch.dtype, least: float = LEAST_OF_TOKEN) -> tuple[Tensor, Tensor]:
    """Return the rows of x as 8-bit numbers, and the scale of each row, float32 [..., 1].

    least: a lower bound of a row's largest absolute value. The scale follows from the larger of the two. With 0, a row
        of zeros has the scale 0.
    """
    wide = x.to(torch.float32).contiguous()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=least) / LARGEST[dtype]
    return narrowed(torch.where(scale == 0, 0.0, wide / scale), dtype), scale


def rounded_in_blocks(x: Tensor, block_size: int, power_of_two: bool) -> Tensor:
    """Return x in float32, rounded as in float8_e4m3fn. Each ``block_size`` neighbours in a row share a scale.

    power_of_two: round scales up to powers of two (ue8m0).
    """
    hidden = x.shape[-1]
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, -hidden % block_size))
    wide = torch.unflatten(padded, -1, (-1, block_size))
    largest, most = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST_OF_BLOCK), LARGEST[torch.float8_e4m3fn]
    if power_of_two:
        scale = next_power_of_two(largest * (1 / most))
        times = 1 / scale
    else:
        # torch computes number / tensor as the tensor's reciprocal times the number, which rounds twice
        scale, times = largest * (1 / most), torch.full_like(largest, most) / largest
    kept = narrowed(wide * times, torch.float8_e4m3fn).to(torch.float32) * scale
    return kept.flatten(-2)[..., :hidden]


def next_power_of_two(values: Tensor) -> Tensor:
    """Return the least power of two that is not below each positive value."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.ones_like(values), exponent - (mantissa == 0.5).to(exponent.dtype))


def rounded_by(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x / scale`` rounded to float8_e4m3fn and multiplied by ``scale`` again, in float32.

    ``scale`` broadcasts.
    """
    scale = scale.to(torch.float32)
    return narrowed(x.to(torch.float32) / scale, torch.float8_e4m3fn).to(torch.float32) * scale


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b.T in float64, which is exact for int8. a: [..., in]; b: [out, in]."""
    return a.to(torch.float64) @ b.to(torch.float64).t()


def widened_blocks(weight: Tensor, scale: Tensor, block_size: int) -> Tensor:
    """Return a weight [..., out, in] in float64, each block times its scale [..., out / block, in / block]."""
    for dim in (-1, -2):
        scale = scale.repeat_interleave(block_size, dim).narrow(dim, 0, weight.shape[dim])
    return weight.to(torch.float64) * scale


def check_quant_dtype(rules: Rules, argument: str, dtype: torch.dtype) -> None:
    """Raise OpArgumentError unless ``dtype`` is one of the two 8-bit dtypes."""
    if dtype not in LARGEST:
        raise rules.error(argument, "torch.int8 or torch.float8_e4m3fn", dtype)


def check_quantised_rows(rules: Rules, x: Tensor, quant_dtype: torch.dtype) -> None:
    """Raise OpArgumentError if the rows of x are empty, or if ``quant_dtype`` is not one of the two 8-bit dtypes."""
    rules.require(x.shape[-1] >= 1, "x", "a last dimension of at least 1", lambda: tuple(x.shape))
    check_quant_dtype(rules, "quant_dtype", quant_dtype)
