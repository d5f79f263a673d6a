"""Resizing of images."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder, Size
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import Build, Call, lowers, unless

aten = torch.ops.aten
I64, F32 = ov.Type.i64, ov.Type.f32


_floats = unless(lambda call: call.result.is_floating_point(), "the image has integers")


def _resized(
    b: Builder, x: Output, sizes: list[Size], how: str, corners: bool, factors: list[float] | None
) -> Output:
    """Resize dimensions 2 and later to ``sizes``.

    As in torch, positions are computed from the caller's ``factors``; if the caller gave none, from the sizes.
    """
    axes = b.axes(list(range(2, rank(x))))
    where = "align_corners" if corners else "asymmetric" if how == "nearest" else "pytorch_half_pixel"
    named: dict[str, Any] = {"coordinate_transformation_mode": where, "cube_coeff": -0.75}
    if how == "nearest":
        named["nearest_mode"] = "floor"
    wide = b.cast(x, F32)
    if factors is not None and not corners:
        scales = b.constant(torch.tensor(factors, dtype=torch.float32))
        result = op.interpolate(wide, scales, how, "scales", axes=axes, **named)
    else:
        result = op.interpolate(wide, b.numbers(sizes), how, "sizes", axes=axes, **named)
    return b.cast(result.output(0), b.kind)


def _target_sizes(b: Builder, x: Output, sizes: Any, factors: Any) -> tuple[list[Size], list[float] | None]:
    """Return the sizes of the result, and the factors or None.

    The call has either ``sizes`` or ``factors``; one is None.
    """
    if sizes is not None:
        return list(sizes), None
    targets: list[Size] = []
    for dim, factor in enumerate(factors, 2):
        old = b.size(x, dim)
        if isinstance(old, int):
            targets.append(int(old * factor))
        else:
            grown = op.multiply(b.cast(old, F32), b.cast(float(factor), F32))
            targets.append(b.cast(op.floor(grown).output(0), I64))
    return targets, [float(factor) for factor in factors]


def _known_factors(call: Call) -> str | None:
    factors = call.fake("scale_factors")
    if factors is not None and not all(isinstance(factor, (int, float)) for factor in factors):
        return "the factor is not fixed"
    return _floats(call)


def _by_size_or_factor(how: str) -> Build:
    def build(
        b: Builder, x: Output, *, output_size: Any, scale_factors: Any, align_corners: bool = False
    ) -> Output:
        sizes, factors = _target_sizes(b, x, output_size, scale_factors)
        return _resized(b, x, sizes, how, align_corners, factors)

    return build


def _by_both(how: str) -> Build:
    def build(
        b: Builder,
        x: Output,
        sizes: list[Size],
        *,
        align_corners: bool = False,
        scales: Any = None,
        scales_h: Any = None,
        scales_w: Any = None,
    ) -> Output:
        factors = [scales] if rank(x) == 3 else [scales_h, scales_w]
        return _resized(b, x, sizes, how, align_corners, None if None in factors else factors)

    return build


for _op, _how in (
    (aten.upsample_linear1d, "linear_onnx"),
    (aten.upsample_bilinear2d, "linear_onnx"),
    (aten.upsample_bicubic2d, "cubic"),
    (aten.upsample_nearest1d, "nearest"),
    (aten.upsample_nearest2d, "nearest"),
):
    lowers(_op.vec, refuses=_known_factors)(_by_size_or_factor(_how))
    lowers(_op.default, refuses=_floats)(_by_both(_how))
