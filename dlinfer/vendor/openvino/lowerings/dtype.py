"""Conversions, and calls that give their input's values back."""

import math
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import lowers

aten = torch.ops.aten


@lowers(
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
)
def to(b: Builder, x: Output, *_: Any) -> Output:
    return b.cast(_plain_nan(b, x), b.kind)


@lowers(
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    aten.positive.default,
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
)
def same(b: Builder, x: Output, *_: Any) -> Output:
    """Of dropout only where it does not train: what draws random numbers is no function of values."""
    return x


@lowers(aten.copy.default)
def copy(b: Builder, x: Output, source: Output, non_blocking: bool = False) -> Output:
    values, sizes = b.cast(_plain_nan(b, source), b.kind), op.shape_of(x, "i64")
    return op.broadcast(values, sizes).output(0) if rank(values) else b.full(values, sizes)


def _plain_nan(b: Builder, x: Any) -> Any:
    """x without the digits of NaN, where it becomes bfloat16: a carry makes zeros of some, and infinities of others."""
    if b.kind != ov.Type.bf16 or not isinstance(x, Output):  # numbers of the graph are plain
        return x
    given = x.get_element_type()
    if given not in (ov.Type.f32, ov.Type.f16):
        return x
    return op.select(op.is_nan(x), b.scalar(math.nan, given), x).output(0)
