"""Layer, group, batch and root mean square normalisation. Statistics are float32 for every dtype, as in torch."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.reductions import moments
from dlinfer.vendor.openvino.lowerings.shapes import channels, rank
from dlinfer.vendor.openvino.registry import Call, lowers

aten, dlinfer = torch.ops.aten, torch.ops.dlinfer
F32 = ov.Type.f32


def _affine(b: Builder, x: Output, weight: Output | None, bias: Output | None) -> Output:
    if weight is not None:
        x = op.multiply(x, b.cast(weight, F32)).output(0)
    return x if bias is None else op.add(x, b.cast(bias, F32)).output(0)


def _last(x: Output, shape: list[int]) -> list[int]:
    """Return the dimensions that layer norm's argument ``normalized_shape`` covers: the last ones of x."""
    return list(range(rank(x) - len(shape), rank(x)))


@lowers(aten.layer_norm.default)
def layer_norm(
    b: Builder, x: Output, shape: list[int], weight: Output | None, bias: Output | None, eps: float, *_: Any
) -> Output:
    normal = op.mvn(b.cast(x, F32), b.axes(_last(x, shape)), True, eps, "inside_sqrt").output(0)
    return b.cast(_affine(b, normal, weight, bias), b.kind)


@lowers(aten.native_layer_norm.default)
def native_layer_norm(
    b: Builder, x: Output, shape: list[int], weight: Output | None, bias: Output | None, eps: float
) -> list[Output]:
    variance, mean = moments(b, x, _last(x, shape), 0)
    scale = op.divide(b.scalar(1.0, F32), op.sqrt(op.add(variance, b.scalar(eps, F32)))).output(0)
    normal = op.multiply(op.subtract(b.cast(x, F32), mean), scale).output(0)
    kind = x.get_element_type()
    return [b.cast(_affine(b, normal, weight, bias), kind), b.cast(mean, kind), b.cast(scale, kind)]


def _by_channel(b: Builder, x: Output, weight: Output | None, bias: Output | None, like: Output) -> Output:
    """Multiply x by a weight and add a bias, both with one number for each channel. The result has ``like``'s type."""
    parameters = [
        None if parameter is None else channels(b, parameter, rank(like)) for parameter in (weight, bias)
    ]
    return b.cast(_affine(b, x, *parameters), like.get_element_type())


def _not_training(call: Call) -> str | None:
    training = call.arguments.get("training", call.arguments.get("use_input_stats", False))
    return "the call updates statistics of the batch" if training else None


@lowers(aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default, refuses=_not_training)
def batch_norm(
    b: Builder,
    x: Output,
    weight: Output | None,
    bias: Output | None,
    mean: Output,
    variance: Output,
    *,
    eps: float,
) -> Any:
    centre, spread = (channels(b, b.cast(tensor, F32), rank(x)) for tensor in (mean, variance))
    root = op.sqrt(op.add(spread, b.scalar(eps, F32)))
    normal = op.divide(op.subtract(b.cast(x, F32), centre), root).output(0)
    result = _by_channel(b, normal, weight, bias, x)
    if isinstance(b.call.result, (list, tuple)):
        empty = b.constant(torch.empty(0))
        return [result, empty, empty]
    return result


@lowers(aten.group_norm.default)
def group_norm(
    b: Builder, x: Output, groups: int, weight: Output | None, bias: Output | None, eps: float, *_: Any
) -> Output:
    grouped = op.reshape(b.cast(x, F32), b.axes([0, groups, -1]), True)
    normal = op.mvn(grouped, b.axes([2]), True, eps, "inside_sqrt")
    back = op.reshape(normal, op.shape_of(x, "i64"), False).output(0)
    return _by_channel(b, back, weight, bias, x)


def _own_statistics(call: Call) -> str | None:
    own = call.arguments["use_input_stats"] and call.arguments["running_mean"] is None
    return None if own else "the call uses running statistics"


@lowers(aten.instance_norm.default, refuses=_own_statistics)
def instance_norm(b: Builder, x: Output, weight: Output | None, bias: Output | None, *, eps: float) -> Output:
    axes = b.axes(list(range(2, rank(x))))
    normal = op.mvn(b.cast(x, F32), axes, True, eps, "inside_sqrt").output(0)
    return _by_channel(b, normal, weight, bias, x)


def root_mean_square(b: Builder, x: Output, axes: list[int], eps: float) -> Output:
    """Return x / sqrt(mean(x^2) + eps), in float32."""
    wide = b.cast(x, F32)
    mean = op.reduce_mean(op.multiply(wide, wide), b.axes(axes), True)
    root = op.sqrt(op.add(mean, b.scalar(eps, F32)))
    return op.divide(wide, root).output(0)


@lowers(aten.rms_norm.default)
def aten_rms_norm(
    b: Builder, x: Output, shape: list[int], weight: Output | None = None, eps: float | None = None
) -> Output:
    """Normalise and multiply by the weight in float32, and round once. ``dlinfer.rms_norm`` rounds twice.

    eps: None means the epsilon of float32.
    """
    small = torch.finfo(torch.float32).eps if eps is None else eps
    return b.cast(_affine(b, root_mean_square(b, x, _last(x, shape), small), weight, None), b.kind)


@lowers(dlinfer.rms_norm.default)
def rms_norm(b: Builder, x: Output, weight: Output, eps: float) -> Output:
    """Normalise in float32 and round to x's dtype, then multiply by the weight, which rounds again."""
    normal = b.cast(root_mean_square(b, x, [rank(x) - 1], eps), x.get_element_type())
    return op.multiply(normal, weight).output(0)


@lowers(dlinfer.add_rms_norm.default)
def add_rms_norm(b: Builder, x: Output, residual: Output, weight: Output, eps: float) -> list[Output]:
    total = op.add(x, residual).output(0)
    return [rms_norm(b, total, weight, eps), total]
