"""Self-test cases of the C++ kernels of 8-bit numbers."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dlinfer.graph.selftest.case import Case, dtype_name
from dlinfer.graph.selftest.torch_cases import FLOATS, ROUNDED, small_whole

_FP8 = torch.float8_e4m3fn
_BLOCK = (16, 64)
_FEW = (1, 2, 3, 4, 16)
"""Rows of x with a float8 weight: every tile, and as many as the kernel is for."""

Native = Callable[[str], Callable[..., Tensor]]


def cases(native: Native, rows: Sequence[int]) -> Iterator[Case]:
    """native: returns a kernel by name. rows: of x, on both sides of each count at which another kernel takes over."""
    for dtype in FLOATS:
        yield _int8_linear(native, rows, dtype)
        yield _fp8_linear(native, dtype)
        yield _rows(native, dtype)
        yield _blocks(native, dtype)
    yield _widened(native)


def _int8_linear(native: Native, rows: Sequence[int], dtype: torch.dtype) -> Case:
    """Any numbers of 8 bits, whose sums are exact in float64; scales are powers of two, and so is the last rounding."""
    generator = torch.Generator().manual_seed(0)

    def numbers(count: int) -> Tensor:
        return torch.randint(-128, 128, (count, 203), generator=generator).to(torch.int8)

    weight, inputs, bias = numbers(70), [numbers(count) for count in rows], small_whole(1, 70, 3)[0]
    scale = (2.0 ** small_whole(70, 1, 4)).float()

    def run() -> Sequence[Tensor]:
        product, given = native("linear_w8a8"), bias.to(dtype)
        scaled = [(x, torch.full((len(x), 1), 2.0**-9)) for x in inputs]
        return [product(x, weight, by, scale, dtype, torch.int8, given) for x, by in scaled]

    def expected() -> Sequence[Tensor]:
        sums = [x.double() @ weight.double().t() * 2.0**-9 * scale.double().t() for x in inputs]
        return [(total.float().to(dtype) + bias.to(dtype)).to(dtype) for total in sums]

    name = f"C++ linear of int8 by int8, of {', '.join(map(str, rows))} rows"
    return Case(name, {"native linear_w8a8"}, dtype_name(dtype), run, expected)


def _fp8_linear(native: Native, dtype: torch.dtype) -> Case:
    """Sums of products of -1, 0 and 1 with -7, 0 and 7, blocks by powers of two: exact in any order, rounded once."""
    weight, scale, bias = small_whole(70, 203, 1) * 7, 2.0 ** small_whole(5, 4, 2), small_whole(1, 70, 3)[0]
    inputs = [small_whole(count, 203, count) for count in _FEW]

    def run() -> Sequence[Tensor]:
        given = (weight.to(_FP8), scale.float(), *_BLOCK, dtype, bias.to(dtype))
        return [native("linear_fp8")(x.float(), *given) for x in inputs]

    def expected() -> Sequence[Tensor]:
        wide = weight * _over_blocks(scale, 70, 203)
        return [((x @ wide.t()).to(dtype) + bias.to(dtype)).to(dtype) for x in inputs]

    name = f"C++ linear with a weight of float8, of {', '.join(map(str, _FEW))} rows"
    return Case(name, {"native linear_fp8"}, dtype_name(dtype), run, expected)


def _over_blocks(scale: Tensor, rows: int, columns: int) -> Tensor:
    """A number for each block, as one for each place."""
    whole = scale.repeat_interleave(_BLOCK[0], 0).repeat_interleave(_BLOCK[1], 1)
    return whole[:rows, :columns]


def _widened(native: Native) -> Case:
    """Every float8, in rows that registers do not divide, by powers of two."""
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
    """Numbers whose largest is that of the 8-bit ones, so that each becomes itself; norms by about one in a hundred."""
    x = small_whole(5, 203, 1) * 40
    x[:, 7] = 127
    large = x.clone()
    large[:, 7] = 448
    weight = torch.full((203,), 0.5)

    def run() -> Sequence[Tensor]:
        given, by = x.to(dtype), weight.to(dtype)
        normed = native("rms_norm_w8a8")(given, by, 1e-6, torch.int8)
        added = native("add_rms_norm_w8a8")(given, torch.zeros_like(given), by, 1e-6, torch.int8)
        quantised = native("dynamic_quant")(given, torch.int8)
        narrow = native("dynamic_quant")(large.to(dtype), _FP8)
        return [one.float() for one in (*quantised, *narrow, *normed, *added)]

    def expected() -> Sequence[Tensor]:
        wide = x.double()
        normed = (wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * 0.5).to(dtype).double()
        scale = normed.abs().amax(1, keepdim=True) / 127
        numbers, ones = (normed / scale).round(), torch.ones(5, 1)
        return [one.float() for one in (wide, ones, large, ones, numbers, scale, numbers, scale, wide)]

    kinds = {f"native {name}" for name in ("dynamic_quant", "rms_norm_w8a8", "add_rms_norm_w8a8")}
    return Case("C++ rows of 8 bits", kinds, dtype_name(dtype), run, expected, ROUNDED[dtype])


def _blocks(native: Native, dtype: torch.dtype) -> Case:
    """Blocks whose largest is 448, so that their scale is 1, and 41, which float8 has not: it has 40 and 44."""
    x = small_whole(5, 203, 1) * 41
    x[:, ::16] = 448

    def run() -> Sequence[Tensor]:
        return [native("rounded_in_blocks")(x.to(dtype), 16, power) for power in (False, True)]

    def expected() -> Sequence[Tensor]:
        return [x.clamp(-40, 40).masked_fill(x == 448, 448).float()] * 2

    return Case(
        "C++ rows rounded in blocks",
        {"native rounded_in_blocks"},
        dtype_name(dtype),
        run,
        expected,
        ROUNDED[torch.float32],
    )
