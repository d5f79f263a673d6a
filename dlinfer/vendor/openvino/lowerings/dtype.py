"""Conversions of dtype, and ops that return their input's values unchanged."""

import math
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import defaults, lowers

aten = torch.ops.aten


@lowers(aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, *defaults("_to_copy type_as"))
def to(b: Builder, x: Output, *_: Any) -> Output:
    return b.cast(_plain_nan(b, x), b.kind)


@lowers(
    *defaults("clone contiguous detach alias lift_fresh lift_fresh_copy resolve_conj resolve_neg positive")
)
@lowers(*defaults("dropout feature_dropout alpha_dropout"))
def same(b: Builder, x: Output, *_: Any) -> Output:
    """Return x. Dropout does nothing outside training; in training it is a random op, which the engine never gets."""
    return x


@lowers(aten.copy.default)
def copy(b: Builder, x: Output, source: Output, non_blocking: bool = False) -> Output:
    values, sizes = b.cast(_plain_nan(b, source), b.kind), op.shape_of(x, "i64")
    return op.broadcast(values, sizes).output(0) if rank(values) else b.full(values, sizes)


def _plain_nan(b: Builder, x: Any) -> Any:
    """Replace the NaNs of x by the standard NaN if x becomes bfloat16.

    Otherwise OpenVINO's rounding may turn them into zeros or infinities.
    """
    if b.kind != ov.Type.bf16 or not isinstance(x, Output):  # Python numbers have plain NaNs
        return x
    kind = x.get_element_type()
    if kind not in (ov.Type.f32, ov.Type.f16):
        return x
    return op.select(op.is_nan(x), b.scalar(math.nan, kind), x).output(0)
