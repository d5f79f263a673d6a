"""Self-test cases of the C++ kernels of 8-bit numbers."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dlinfer.graph.selftest.case import Case, dtype_name
from dlinfer.graph.selftest.torch_cases import FLOATS, ROUNDED, small_whole

_FP8 = torch.float8_e4m3fn
_BLOCK = (16, 64)
Native = Callable[[str], Callable[..., Tensor]]


def cases(native: Native) -> Iterator[Case]:
    """Yield the cases. native: takes a kernel's name and returns the kernel."""
    for dtype in FLOATS:
        yield _rows(native, dtype)
    yield _widened(native)


def _over_blocks(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Expand a scale for each block to a scale for each element."""
    whole = scale.repeat_interleave(_BLOCK[0], 0).repeat_interleave(_BLOCK[1], 1)
    return whole[:rows, :columns]


def _widened(native: Native) -> Case:
    """Return a case that dequantises every float8 number by powers of two, in rows that do not fill whole registers."""
    bits = torch.arange(67 * 137).view(67, 137).remainder(256).to(torch.uint8)
    scale = 2.0 ** small_whole(5, 3, 2)

    def run() -> Sequence[Tensor]:
        return [native("widen_fp8")(bits.view(_FP8), scale.float(), *_BLOCK)]

    def expected() -> Sequence[Tensor]:
        sign, exponent, mantissa = bits.int() >> 7, (bits.int() >> 3) & 15, bits.double() % 8
        sizes = torch.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
        sizes = sizes.masked_fill(bits % 128 == 127, torch.nan)
        return [(torch.where(sign > 0, -sizes, sizes) * _over_blocks(scale, 67, 137)).float()]

    return Case("C++ float8 widened", {"native widen_fp8"}, "float32", run, expected)


def _rows(native: Native, dtype: torch.dtype) -> Case:
    """Return a case that quantises rows of ``dtype`` to 8 bits, directly and after an RMS norm.

    The rows of whole numbers get scale 1, so quantisation does not change them. The results of the norm get a scale of
    about 1/100.
    """
    x = small_whole(5, 203, 1) * 40
    x[:, 7] = 127
    large = x.clone()
    large[:, 7] = 448
    weight = torch.full((203,), 0.5)

    def run() -> Sequence[Tensor]:
        narrow_x, by = x.to(dtype), weight.to(dtype)
        normed = native("rms_norm_w8a8")(narrow_x, by, 1e-6, torch.int8)
        added = native("add_rms_norm_w8a8")(narrow_x, torch.zeros_like(narrow_x), by, 1e-6, torch.int8)
        quantised = native("dynamic_quant")(narrow_x, torch.int8)
        narrow = native("dynamic_quant")(large.to(dtype), _FP8)
        return [result.float() for result in (*quantised, *narrow, *normed, *added)]

    def expected() -> Sequence[Tensor]:
        wide = x.double()
        normed = (wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * 0.5).to(dtype).double()
        scale = normed.abs().amax(1, keepdim=True) / 127
        numbers, ones = (normed / scale).round(), torch.ones(5, 1)
        return [result.float() for result in (wide, ones, large, ones, numbers, scale, numbers, scale, wide)]

    kinds = {f"native {name}" for name in ("dynamic_quant", "rms_norm_w8a8", "add_rms_norm_w8a8")}
    return Case("C++ rows of 8 bits", kinds, dtype_name(dtype), run, expected, ROUNDED[dtype])
