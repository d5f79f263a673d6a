"""A linear layer whose weight is of 4 bits.

The weight is written as arithmetic on words, so that it is right for any weight. Its numbers and zero points are
marked, with the name of the input that they come from: where that becomes a constant, ``weights.with_weights`` puts
constants of 4 bits in their place, which the CPU plugin keeps so.
"""

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.ops.quantised.packing import AWQ
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.matrix import linear
from dlinfer.vendor.openvino.registry import Call, lowers
from dlinfer.vendor.openvino.weights import packed_name

dlinfer = torch.ops.dlinfer


def _whole_groups(call: Call) -> str | None:
    sizes = [*call.fake("qweight").shape, *call.fake("scales").shape]
    if any(fixed_size(size) is None for size in sizes):
        return "a packed weight of a size that varies"
    if not all(fixed_size(size) for size in sizes):
        return "a packed weight without numbers, with which the CPU plugin ends the process"
    size = call.given["group_size"]
    return "a last group of a packed weight that is shorter" if size and int(sizes[0]) % size else None


@lowers(dlinfer.weight_quant_matmul.default, refuses=_whole_groups)
def weight_quant_matmul(
    b: Builder,
    x: Output,
    qweight: Output,
    scales: Output,
    offset: Output | None,
    bias: Output | None,
    group_size: int,
) -> Output:
    groups, out_features = (int(one) for one in b.call.fake("scales").shape)
    size = group_size or int(b.call.fake("qweight").shape[0])
    numbers = _rows(b, qweight, groups, size, out_features)
    eight = b.scalar(float(AWQ.middle), ov.Type.f32)
    zeros = eight if offset is None else _rows(b, offset, groups, 1, out_features)
    wide = op.unsqueeze(op.transpose(b.cast(scales, ov.Type.f32), b.axes([1, 0])), b.axes([2]))
    whole = op.multiply(op.subtract(numbers, zeros), wide)
    weight = op.reshape(whole, b.axes([out_features, groups * size]), False).output(0)
    # Behind a conversion to 16 bits the plugin would not know a packed weight, and widen all of it at each call.
    wide_bias = None if bias is None else b.cast(bias, ov.Type.f32)
    return b.cast(linear(b, b.cast(x, ov.Type.f32), weight, wide_bias), b.kind)


def _rows(b: Builder, words: Output, groups: int, size: int, out_features: int) -> Output:
    """The numbers of words [groups * size, out_features / 8] as float32 [out_features, groups, size], marked."""
    parts = []
    for which in range(AWQ.per_word):
        place = b.scalar(AWQ.order.index(which) * AWQ.bits, ov.Type.i32)
        part = op.bitwise_and(op.bitwise_right_shift(words, place), b.scalar(15, ov.Type.i32))
        parts.append(op.unsqueeze(part, b.axes([2])).output(0))
    numbers = op.convert(op.concat(parts, 2), ov.Type.f32)
    by_group = op.reshape(numbers, b.axes([groups, size, out_features]), False)
    made = op.transpose(by_group, b.axes([2, 0, 1]))
    if words.get_node().get_type_name() == "Parameter":
        made.set_friendly_name(packed_name(words.get_node().get_friendly_name(), groups, size))
    return made.output(0)
