"""Normalisation: by layer, group, batch and root mean square. Statistics are float32 in every dtype, as torch's."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.reductions import moments
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import Call, lowers

aten, dlinfer = torch.ops.aten, torch.ops.dlinfer
F32 = ov.Type.f32


def _affine(b: Builder, x: Output, weight: Output | None, bias: Output | None) -> Output:
    """x in float32, times weight, plus bias."""
    if weight is not None:
        x = op.multiply(x, b.cast(weight, F32)).output(0)
    return x if bias is None else op.add(x, b.cast(bias, F32)).output(0)


@lowers(aten.layer_norm.default)
def layer_norm(
    b: Builder,
    x: Output,
    shape: list[int],
    weight: Output | None = None,
    bias: Output | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Output:
    axes = [dim % rank(x) for dim in range(-len(shape), 0)]
    normal = op.mvn(b.cast(x, F32), b.axes(axes), True, eps, "inside_sqrt").output(0)
    return b.cast(_affine(b, normal, weight, bias), b.kind)


@lowers(aten.native_layer_norm.default)
def native_layer_norm(
    b: Builder, x: Output, shape: list[int], weight: Output | None, bias: Output | None, eps: float
) -> list[Output]:
    axes = [dim % rank(x) for dim in range(-len(shape), 0)]
    variance, mean = moments(b, x, axes, 0)
    scale = op.divide(b.scalar(1.0, F32), op.sqrt(op.add(variance, b.scalar(eps, F32)))).output(0)
    normal = op.multiply(op.subtract(b.cast(x, F32), mean), scale).output(0)
    kind = x.get_element_type()
    return [b.cast(_affine(b, normal, weight, bias), kind), b.cast(mean, kind), b.cast(scale, kind)]


def _channels(b: Builder, value: Output | None, dims: int) -> Output | None:
    """[channels] as [1, channels, 1, ...]."""
    if value is None:
        return None
    return op.reshape(b.cast(value, F32), b.axes([1, -1, *([1] * (dims - 2))]), False).output(0)


def _not_training(call: Call) -> str | None:
    training = call.given.get("training", call.given.get("use_input_stats", False))
    return "statistics of the batch are updated" if training else None


@lowers(aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default, refuses=_not_training)
def batch_norm(
    b: Builder,
    x: Output,
    weight: Output | None,
    bias: Output | None,
    mean: Output,
    variance: Output,
    *rest: Any,
) -> Any:
    eps = float([one for one in rest if isinstance(one, float)][-1])
    dims = rank(x)
    centre, spread = _channels(b, mean, dims), _channels(b, variance, dims)
    assert spread is not None and centre is not None
    root = op.sqrt(op.add(spread, b.scalar(eps, F32)))
    normal = op.divide(op.subtract(b.cast(x, F32), centre), root).output(0)
    made = b.cast(
        _affine(b, normal, _channels(b, weight, dims), _channels(b, bias, dims)), x.get_element_type()
    )
    if isinstance(b.call.result, (list, tuple)):
        empty = b.constant(torch.empty(0))
        return [made, empty, empty]
    return made


@lowers(aten.group_norm.default)
def group_norm(
    b: Builder,
    x: Output,
    groups: int,
    weight: Output | None = None,
    bias: Output | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Output:
    wide = b.cast(x, F32)
    grouped = op.reshape(wide, b.axes([0, groups, -1]), True)
    normal = op.mvn(grouped, b.axes([2]), True, eps, "inside_sqrt")
    back = op.reshape(normal, op.shape_of(x, "i64"), False).output(0)
    dims = rank(x)
    return b.cast(_affine(b, back, _channels(b, weight, dims), _channels(b, bias, dims)), b.kind)


def _own_statistics(call: Call) -> str | None:
    return (
        None if call.given["use_input_stats"] and call.given["running_mean"] is None else "running statistics"
    )


@lowers(aten.instance_norm.default, refuses=_own_statistics)
def instance_norm(
    b: Builder,
    x: Output,
    weight: Output | None,
    bias: Output | None,
    mean: Any,
    variance: Any,
    use: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Output:
    dims = rank(x)
    normal = op.mvn(b.cast(x, F32), b.axes(list(range(2, dims))), True, eps, "inside_sqrt").output(0)
    return b.cast(_affine(b, normal, _channels(b, weight, dims), _channels(b, bias, dims)), b.kind)


def root_mean_square(b: Builder, x: Output, axes: list[int], eps: float) -> Output:
    """x / sqrt(mean(x^2) + eps), in float32."""
    wide = b.cast(x, F32)
    mean = op.reduce_mean(op.multiply(wide, wide), b.axes(axes), True)
    root = op.sqrt(op.add(mean, b.scalar(eps, F32)))
    return op.divide(wide, root).output(0)


@lowers(aten.rms_norm.default)
def aten_rms_norm(
    b: Builder, x: Output, shape: list[int], weight: Output | None = None, eps: float | None = None
) -> Output:
    """In float32 throughout, rounded once, unlike ``dlinfer.rms_norm``."""
    axes = [dim % rank(x) for dim in range(-len(shape), 0)]
    small = torch.finfo(b.result.dtype).eps if eps is None else eps
    return b.cast(_affine(b, root_mean_square(b, x, axes, small), weight, None), b.kind)


def rms(b: Builder, x: Output, weight: Output, eps: float) -> Output:
    """As ``dlinfer.rms_norm``: rounded to x's dtype before the weight."""
    kind = x.get_element_type()
    normal = b.cast(root_mean_square(b, x, [rank(x) - 1], eps), kind)
    return op.multiply(normal, weight).output(0)


@lowers(dlinfer.rms_norm.default)
def rms_norm(b: Builder, x: Output, weight: Output, eps: float) -> Output:
    return rms(b, x, weight, eps)


@lowers(dlinfer.add_rms_norm.default)
def add_rms_norm(b: Builder, x: Output, residual: Output, weight: Output, eps: float) -> list[Output]:
    total = op.add(x, residual).output(0)
    return [rms(b, total, weight, eps), total]
