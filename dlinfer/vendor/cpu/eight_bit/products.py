"""Products with 8-bit weights: int8 rows by int8 weights, exactly; and float rows by float8 weights.

C++ kernels read the weight in place, but the one for float8 serves only calls with few rows, such as a decode step's.
Torch serves the other calls: it converts and multiplies the weight piece by piece."""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.graph.cache.fingerprint import cpu_flags
from dlinfer.graph.torch_private.products import int_mm
from dlinfer.ops.core.checks import FLOATS
from dlinfer.vendor.cpu.compiled import compiled

PIECE = 2 << 20
"""The most elements of a weight to dequantise at a time, 8 MiB in float32. A single row may have more."""

FEWEST_COLUMNS = 64
"""The fewest columns of an int8 result to compute in one product, even if the result has many rows."""

FEW_FP8_ROWS = 16
"""The most rows for the C++ kernel of float8 weights. It dequantises the whole weight again for every four rows."""


def scaled_int8_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """Return (a @ b.T) * a_scale * b_scale, rounded to dtype, + bias.

    a: int8 [rows, in].
    b: int8 [out, in].
    a_scale: [rows], float32 or float64; the int32 sums are scaled in this dtype.
    b_scale: [out], of the same dtype as a_scale.
    bias: [out], of ``dtype``.
    """
    fits = dtype in FLOATS and a_scale.dtype is b_scale.dtype is torch.float32
    kernel = compiled("linear_w8a8", a, b, dtype=dtype) if fits else None
    if kernel is not None:
        return kernel(a, b, a_scale, b_scale, dtype, torch.int8, bias)
    # In pieces: the int32 sums, their floats, and oneDNN's copy of a weight would take many times the memory of the
    # result. Scaling each piece at once is also faster.
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype)
    most = max(PIECE // max(a.shape[0], 1), FEWEST_COLUMNS)
    for start, end in _pieces(b, most=most):
        sums = int8_product(a, b[start:end]).to(a_scale.dtype)
        out[:, start:end] = sums.mul_(a_scale[:, None]).mul_(b_scale[start:end])
    return out if bias is None else out.add_(bias)


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the int32 product a @ b.T of int8 a [rows, in] and int8 b [out, in]."""
    if _torch_is_exact() and a.shape[1] > 1:  # torch 2.13 returns uninitialised memory for one column
        return int_mm(a, b.t())
    wide = a.to(torch.float64)
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.int32)
    for start, end in _pieces(b):
        out[:, start:end] = wide @ b[start:end].to(torch.float64).t()
    return out


def scaled_fp8_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """Return (a @ b.T) * a_scale * b_scale, rounded to dtype, + bias.

    a: float8 [rows, in].
    b: float8_e4m3fn [out, in].
    a_scale: [rows], float32 or float64.
    b_scale: [out], float32 or float64.
    bias: [out], of ``dtype``.
    """
    return fp8_product(
        a.to(torch.float32) * a_scale[:, None], b, b_scale[:, None], (1, b.shape[1]), dtype, bias
    )


def fp8_product(
    x: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """Return x @ (weight * scale).T, rounded to dtype, + bias.

    x: [rows, in], float32 or float64.
    weight: float8_e4m3fn [out, in].
    scale: one number for each block[0] rows and block[1] columns of the weight, float32 or float64.
    bias: [out], of ``dtype``.

    The product is computed in float64 if x, scale or dtype is float64.
    """
    fits = dtype in FLOATS and x.dtype is scale.dtype is torch.float32 and weight.shape[1] > 0
    few = fits and x.shape[0] <= FEW_FP8_ROWS
    kernel = compiled("linear_fp8", x, weight, dtype=dtype) if few else None
    if kernel is not None:
        return kernel(x, weight, scale, *block, dtype, bias)
    wide_dtype = torch.float64 if torch.float64 in (x.dtype, scale.dtype, dtype) else torch.float32
    widen = compiled("widen_fp8", weight, dtype=torch.float32) if fits and not few else None
    widen = widen or functools.partial(_widened, dtype=wide_dtype)
    x, out = x.to(wide_dtype), x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)
    for start, end in _pieces(weight, block[0]):
        scales = scale[start // block[0] : -(-end // block[0])]
        out[:, start:end] = functional.linear(x, widen(weight[start:end], scales, *block))
    return out if bias is None else out.add_(bias)


def _widened(
    weight: Tensor, scale: Tensor, block_rows: int, block_columns: int, dtype: torch.dtype
) -> Tensor:
    wide, block = weight.to(dtype), (block_rows, block_columns)
    for dim in (0, 1):
        if scale.shape[dim] != 1:
            scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, wide.shape[dim])
    return wide.mul_(scale)


def _pieces(weight: Tensor, multiple: int = 1, most: int = PIECE) -> list[tuple[int, int]]:
    """Split a weight's rows into pieces of about PIECE elements; return pairs (first row, end).

    multiple: each first row is a multiple of this number. most: the most rows of a piece; the default is so many that
        only the number of elements counts."""
    rows, columns = weight.shape
    step = max(min(PIECE // max(columns, 1), most) // multiple, 1) * multiple
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


@functools.cache
def _torch_is_exact() -> bool:
    """Return whether torch's int8 product is exact on this CPU.

    Without VNNI or AMX, oneDNN adds pairs of products in 16 bits, and large sums saturate.
    """
    return any("vnni" in flag or flag == "amx_int8" for flag in cpu_flags().split())
