"""The meaning of 8-bit numbers: the rounding and the scales that LMDeploy's checkpoints were made for.

A value is its 8-bit number times a scale. Everything here is float32 arithmetic, whatever the input's dtype. So an
input has the same numbers on every device. Two devices that round differently would be a whole step apart.
"""

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes, and the number that the largest value of a row becomes."""

LEAST_OF_TOKEN = 1e-7
LEAST_OF_BLOCK = 1e-6
"""A row's largest value counts as at least this much, so that zeros have a scale too; LMDeploy's kernels have both."""


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values as the nearest 8-bit numbers; what is beyond the largest becomes that.

    Halves go away from zero in int8, as in LMDeploy's kernels (libdevice ``round``), and to even in float8.
    """
    if dtype is torch.int8:
        whole = values.trunc()
        values = whole + ((values - whole).abs() >= 0.5) * values.sign()
        return values.clamp(-128, 127).to(torch.int8)
    return values.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def per_token(x: Tensor, dtype: torch.dtype, least: float = LEAST_OF_TOKEN) -> tuple[Tensor, Tensor]:
    """Rows as 8-bit numbers, and the scale of each row: float32 [..., 1]. With ``least`` 0, zeros have scale 0."""
    wide = x.to(torch.float32).contiguous()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=least) / LARGEST[dtype]
    return narrowed(torch.where(scale == 0, 0.0, wide / scale), dtype), scale


def rounded_in_blocks(x: Tensor, block_size: int, power_of_two: bool) -> Tensor:
    """x as float8_e4m3fn would keep it with one scale for each ``block_size`` neighbours of a row; float32.

    power_of_two: scales are the next power of two (ue8m0).
    """
    hidden = x.shape[-1]
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, -hidden % block_size))
    wide = torch.unflatten(padded, -1, (-1, block_size))
    largest, most = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST_OF_BLOCK), LARGEST[torch.float8_e4m3fn]
    if power_of_two:
        scale = next_power_of_two(largest * (1 / most))
        times = 1 / scale
    else:
        # a number divided by a tensor is the tensor's reciprocal times the number, which rounds twice
        scale, times = largest * (1 / most), torch.full_like(largest, most) / largest
    kept = narrowed(wide * times, torch.float8_e4m3fn).to(torch.float32) * scale
    return kept.flatten(-2)[..., :hidden]


def next_power_of_two(values: Tensor) -> Tensor:
    """The least power of two that is not below each positive value."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.ones_like(values), exponent - (mantissa == 0.5).to(exponent.dtype))


def rounded_by(x: Tensor, scale: Tensor) -> Tensor:
    """x as float8_e4m3fn would keep it with a given scale, which broadcasts; float32."""
    scale = scale.to(torch.float32)
    return narrowed(x.to(torch.float32) / scale, torch.float8_e4m3fn).to(torch.float32) * scale


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T, a of [..., in] and b of [out, in], in float64: exact for int8."""
    return a.to(torch.float64) @ b.to(torch.float64).t()


def widened_blocks(weight: Tensor, scale: Tensor, block_size: int) -> Tensor:
    """A weight [..., out, in] times the scale [..., out / block, in / block] of each square block, in float64."""
    for dim in (-1, -2):
        scale = scale.repeat_interleave(block_size, dim).narrow(dim, 0, weight.shape[dim])
    return weight.to(torch.float64) * scale


def check_quant_dtype(rules: Rules, argument: str, dtype: torch.dtype) -> None:
    """One of the two 8-bit dtypes."""
    if dtype not in LARGEST:
        raise rules.error(argument, "torch.int8 or torch.float8_e4m3fn", dtype)


def check_quantised_rows(rules: Rules, x: Tensor, quant_dtype: torch.dtype) -> None:
    """Rows that have a largest value, and the 8-bit dtype that they become."""
    rules.require(x.shape[-1] >= 1, "x", "a last dimension of at least 1", lambda: tuple(x.shape))
    check_quant_dtype(rules, "quant_dtype", quant_dtype)
